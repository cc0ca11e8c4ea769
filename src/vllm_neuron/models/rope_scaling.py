"""Rotary frequencies from a Hugging Face configuration, for every scaling rule that we have.

The numbers follow transformers' `modeling_rope_utils`; a test compares them. D is the head size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_neuron.models.errors import UnsupportedModelError


@dataclass(frozen=True)
class RopeTable:
    """What a rotary embedding is made of.

    Attributes:
        inv_freq: [D / 2] float32, radians per position.
        scale: factor of cosines and sines (1 except for YaRN).
    """

    inv_freq: torch.Tensor
    scale: float


def rope_table(hf_config: Any, head_dim: int, max_model_len: int | None) -> RopeTable:
    """Frequencies for `hf_config`, whose rope settings are spelt as transformers 4 or as transformers 5 does.

    Args:
        hf_config: has `rope_parameters` (v5, with `rope_theta` in it), or `rope_theta` and `rope_scaling` (v4).
        head_dim: D.
        max_model_len: longest sequence that will be served; None is the model's own maximum.

    Raises:
        UnsupportedModelError: a scaling rule that we do not have, or one that lacks a parameter.
    """
    parameters = _parameters(hf_config)
    kind = parameters["rope_type"]
    if kind not in _RULES:
        raise UnsupportedModelError(
            f"not supported yet: rope scaling of type {kind!r} (supported: {', '.join(sorted(_RULES))})"
        )
    if parameters["partial_rotary_factor"] != 1.0:
        raise UnsupportedModelError(
            f"not supported yet: partial_rotary_factor={parameters['partial_rotary_factor']} (supported: 1.0)"
        )
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim={head_dim}: a rotary embedding needs an even head size")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    try:
        return _RULES[kind](frequencies, parameters, max_model_len)
    except KeyError as missing:
        raise UnsupportedModelError(
            f"rope scaling of type {kind!r} needs {missing} in the model's config.json"
        ) from None


def _parameters(hf_config: Any) -> dict[str, Any]:
    """All rope settings in one flat dict, whatever the spelling; rope_type and rope_theta always set."""
    given: Mapping[str, Any] = (
        getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    )
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(
            f"not supported yet: rope parameters that differ by layer type ({', '.join(nested)})"
        )
    return {
        "partial_rotary_factor": getattr(hf_config, "partial_rotary_factor", None) or 1.0,
        **{key: value for key, value in given.items() if value is not None},
        "rope_type": given.get("rope_type") or given.get("type") or "default",
        "rope_theta": given.get("rope_theta") or getattr(hf_config, "rope_theta", None) or 10000.0,
        "max_position_embeddings": hf_config.max_position_embeddings,
    }


def _default(frequencies: torch.Tensor, parameters: dict[str, Any], max_model_len: int | None) -> RopeTable:
    return RopeTable(frequencies, 1.0)


def _linear(frequencies: torch.Tensor, parameters: dict[str, Any], max_model_len: int | None) -> RopeTable:
    return RopeTable(frequencies / parameters["factor"], 1.0)


def _dynamic(frequencies: torch.Tensor, parameters: dict[str, Any], max_model_len: int | None) -> RopeTable:
    """Plain up to the trained length. Past it every frequency changes with the length of the sequence."""
    trained = parameters["max_position_embeddings"]
    if max_model_len is not None and max_model_len > trained:
        raise UnsupportedModelError(
            f"not supported yet: dynamic rope scaling beyond max_position_embeddings={trained} "
            f"(max_model_len={max_model_len}); set --max-model-len {trained} or less"
        )
    return RopeTable(frequencies, 1.0)


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any], max_model_len: int | None) -> RopeTable:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended linearly."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return RopeTable(frequencies * (kept + (1 - kept) / factor), 1.0)


def _yarn(frequencies: torch.Tensor, parameters: dict[str, Any], max_model_len: int | None) -> RopeTable:
    """YaRN (arXiv 2309.00071): blend by the number of turns over the trained length; cosines and sines are scaled."""
    factor, theta, dim = parameters["factor"], parameters["rope_theta"], 2 * len(frequencies)
    trained = parameters.get("original_max_position_embeddings") or parameters["max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension(parameters.get("beta_fast") or 32)
    last = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return RopeTable(frequencies * (slowed / factor + (1 - slowed)), _yarn_scale(factor, parameters))


def _yarn_scale(factor: float, parameters: dict[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)


_RULES: Mapping[str, Callable[[torch.Tensor, dict[str, Any], int | None], RopeTable]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
