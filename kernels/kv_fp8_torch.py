"""8-bit floats in the KV cache: what their scales are, and the torch twins of `kv_quantize` and `kv_dequantize`."""

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn


class KVScales(NamedTuple):
    """How a layer's keys and values become 8-bit floats, and numbers again. All float32, and arguments of the graph.

    Attributes:
        quantize: [2], what keys and what values are multiplied by when they are written.
        dequantize: [2], what they are multiplied by when they are read: the reciprocals.
        limit: [1], the largest magnitude that is stored.
    """

    quantize: torch.Tensor
    dequantize: torch.Tensor
    limit: torch.Tensor


def require_scales(dtype: torch.dtype, scales: KVScales | None) -> None:
    """Check that a cache of this dtype comes with scales if, and only if, it holds 8-bit floats.

    Raises:
        ValueError: it does not.
    """
    if (dtype is FP8) != (scales is not None):
        raise ValueError(f"a KV cache of {dtype} comes {'without' if scales is None else 'with'} scales")


def kv_quantize(x: torch.Tensor, factor: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """x [T, K, D] times `factor` ([1], float32), clamped to +-`limit` ([1], float32), as float8_e4m3fn.

    The clamp comes first, because float8_e4m3fn has no infinity: what is too large for it becomes NaN.
    """
    return torch.minimum(torch.maximum(x.float() * factor, -limit), limit).to(FP8)


def kv_dequantize(values: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [T, K, D] of `kv_quantize` times `factor` ([1], float32), in `dtype`."""
    return (values.float() * factor).to(dtype)
