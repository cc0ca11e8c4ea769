"""Torch twin of `kv_write`."""

import torch


def kv_write(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches [NB, BS, K, D] with rows k and v [T, K, D] at `slots` [T]; slot s is row s of the [NB * BS, K, D] view.

    Padding rows may share one slot of the null block: which of them wins is undefined, and nobody reads it.
    """
    index = slots.long()
    return _write(k_cache, k, index), _write(v_cache, v, index)


def _write(cache: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return cache.flatten(0, 1).index_copy(0, index, rows.to(cache.dtype)).view(cache.shape)
