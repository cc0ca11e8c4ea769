"""Quantized checkpoints: recognised, and refused until one of their forms is supported."""

from collections.abc import Mapping
from typing import Any


class QuantizedCheckpointError(ValueError):
    """The checkpoint is quantized in a form that we do not read."""


def refuse_quantized(hf_config: Any) -> None:
    """Raise QuantizedCheckpointError if the configuration declares a quantization scheme. An empty one is none."""
    for key in ("quantization_config", "compression_config"):
        declared = getattr(hf_config, key, None)
        if declared:
            raise QuantizedCheckpointError(
                f"not supported yet: quantized checkpoints; config.json declares {key} with scheme "
                f"{_scheme(declared)!r}. Serve an unquantized checkpoint (bfloat16, float16 or float32)."
            )


def _scheme(declared: Any) -> str:
    fields = declared if isinstance(declared, Mapping) else vars(declared)
    names = (fields.get(key) for key in ("quant_method", "quant_algo", "format"))
    return " ".join(str(getattr(name, "value", name)) for name in names if name) or "unnamed"
