"""Rotary embedding, cache write and attention over the paged cache."""

import torch

from vllm_neuron.kernels.dispatch import implementation
from vllm_neuron.kernels.kv_fp8_torch import KVScales


def rope_tables(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of position * inv_freq, times `scale`, for positions [T], inv_freq [D/2]: two [T, D/2] float32."""
    return implementation("rope_tables")(positions, inv_freq, scale)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of q [T, N, D] and k [T, K, D] (arXiv 2104.09864), dimension i paired with i + D/2."""
    return implementation("rope")(q, k, cos, sin)


def kv_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    scales: KVScales | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches [NB, BS, K, D] with k and v [T, K, D] written at `slots` [T]. The caller drops the old caches.

    Caches of 8-bit floats need `scales`.
    """
    return implementation("kv_write")(k_cache, v_cache, k, v, slots, scales)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Causal grouped-query attention of q [T, N, D] over caches [NB, BS, K, D]: [T, N, D].

    Row t reads positions 0 .. positions[t] (or the last `window` of them) of its request, found through
    block_table [B, S / BS]. Its own keys and values must already be in the cache. `sinks` [N] float32 are scores that
    take part in the softmax and have no value. Caches of 8-bit floats need `scales`.
    """
    attend = implementation("paged_attention")
    return attend(q, k_cache, v_cache, block_table, positions, scale, window, sinks, scales)
