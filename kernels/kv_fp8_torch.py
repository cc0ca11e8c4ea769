"""Torch twins of `kv_quantize` and `kv_dequantize`."""

import torch

FP8_MAX = 240.0
"""Largest value of Trainium 2's float8_e4m3. Up to it float8_e4m3fn, which goes on to 448, has the same bits."""


def kv_quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, K, D] times 1 / `scale` ([1], float32), clamped to +-240, as float8_e4m3fn."""
    return (x.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def kv_dequantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [T, K, D] of kv_quantize times `scale` ([1], float32), in `dtype`."""
    return (values.float() * scale).to(dtype)
