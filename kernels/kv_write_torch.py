"""Torch twin of `kv_write`."""

import torch

from vllm_neuron.kernels.kv_fp8_torch import KVScales, kv_quantize, require_scales


def kv_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    scales: KVScales | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches [NB, BS, K, D] with rows k and v [T, K, D] at `slots` [T]; slot s is row s of the [NB * BS, K, D] view.

    Padding rows may share one slot of the null block: which of them wins is undefined, and nobody reads it.

    Args:
        scales: of caches of 8-bit floats, which take the rows quantized; None for others.

    Raises:
        ValueError: scales are missing, or are not wanted.
    """
    require_scales(k_cache.dtype, scales)
    index = slots.long()
    if scales is None:
        return _write(k_cache, k.to(k_cache.dtype), index), _write(v_cache, v.to(v_cache.dtype), index)
    k_factor, v_factor = scales.quantize.split(1)
    return (
        _write_bytes(k_cache, kv_quantize(k, k_factor, scales.limit), index),
        _write_bytes(v_cache, kv_quantize(v, v_factor, scales.limit), index),
    )


def _write(cache: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return cache.flatten(0, 1).index_copy(0, index, rows).view(cache.shape)


def _write_bytes(cache: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`_write` of elements as bytes: torch does not move 8-bit floats."""
    return _write(cache.view(torch.uint8), rows.view(torch.uint8), index).view(cache.dtype)
