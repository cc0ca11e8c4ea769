"""What a checkpoint's configuration declares of quantization: scales of the KV cache are read, all else is refused."""

from collections.abc import Mapping
from typing import Any

_KEYS = ("quantization_config", "compression_config")
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""What compressed-tensors calls an FP8 KV cache with one calibrated scale."""


class QuantizedCheckpointError(ValueError):
    """The checkpoint is quantized in a form that we do not read."""


def refuse_quantized(hf_config: Any) -> None:
    """Raise QuantizedCheckpointError if the configuration declares quantized weights or activations.

    An empty declaration is none, and one of FP8 scales of the KV cache alone is fine.
    """
    for key in _KEYS:
        declared = getattr(hf_config, key, None)
        if declared and not _is_of_kv_cache(_fields(declared)):
            raise QuantizedCheckpointError(
                f"not supported yet: quantized checkpoints; config.json declares {key} with scheme "
                f"{_scheme(declared)!r}. Serve an unquantized checkpoint (bfloat16, float16 or float32); scales of an "
                "FP8 KV cache alone are supported, one per layer for keys and one for values."
            )


def quantizes_kv_cache_only(hf_config: Any) -> bool:
    """Whether the configuration declares FP8 scales of the KV cache, and nothing else that is quantized."""
    declared = [value for key in _KEYS if (value := getattr(hf_config, key, None))]
    return bool(declared) and all(_is_of_kv_cache(_fields(value)) for value in declared)


def _is_of_kv_cache(fields: Mapping[str, Any]) -> bool:
    method = str(fields.get("quant_method", ""))
    if method == "compressed-tensors":
        scheme = fields.get("kv_cache_scheme")
        groups = (fields.get("config_groups") or {}).values()
        return (
            bool(scheme)
            and all(_fields(scheme).get(name, value) == value for name, value in _KV_SCHEME.items())
            and all(_is_of_attention(_fields(group)) for group in groups)
        )
    producer = fields.get("producer") or {}
    if method.startswith("modelopt") or producer.get("name") == "modelopt":
        # Earlier releases of ModelOpt have a file of their own, hf_quant_config.json, without a quant_method.
        inner = fields.get("quantization", fields)
        return not inner.get("quant_algo") and str(inner.get("kv_cache_quant_algo")).upper() == "FP8"
    return False


def _is_of_attention(group: Mapping[str, Any]) -> bool:
    """Whether a group of compressed-tensors tells the inputs of attention only, which are the KV cache."""
    targets = group.get("targets") or ()
    return (
        not group.get("weights")
        and not group.get("output_activations")
        and (not group.get("input_activations") or (bool(targets) and all("Attention" in name for name in targets)))
    )


def _fields(declared: Any) -> Mapping[str, Any]:
    return declared if isinstance(declared, Mapping) else vars(declared)


def _scheme(declared: Any) -> str:
    fields = _fields(declared)
    names = (fields.get(key) for key in ("quant_method", "quant_algo", "format"))
    return " ".join(str(getattr(name, "value", name)) for name in names if name) or "unnamed"
