"""Torch twin of `paged_attention`."""

import math

import torch

from vllm_neuron.kernels.kv_fp8_torch import KVScales, require_scales


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
    """softmax(scale * q k^T) v over the blocks of each row's request.

    The T rows are B requests of T / B rows each, in order. Row t sees the keys at positions 0 .. positions[t] of its
    request, or the last `window` of them. Whatever else the blocks hold (NaN included) does not reach the result.

    Args:
        q: [T, N, D]; query head n reads KV head n // (N / K).
        k_cache, v_cache: [NB, BS, K, D].
        block_table: [B, S / BS], physical block of each logical block.
        positions: [T].
        scale: factor of the scores, usually D ** -0.5.
        window: positions a row looks back on, its own included; None is all of them.
        sinks: [N] float32, a score per head that takes part in the softmax and has no value (arXiv 2508.10925);
            None is without.
        scales: of caches of 8-bit floats. As one scale holds for all keys and one for all values, they multiply scores
            and results in float32; None for other caches.

    Raises:
        ValueError: scales are missing, or are not wanted.

    Returns:
        [T, N, D] in q's dtype. Scores and softmax are float32; the two products take q's dtype and sum in float32.
    """
    require_scales(k_cache.dtype, scales)
    tokens, heads, dim = q.shape
    requests, blocks = block_table.shape
    block_size, kv_heads = k_cache.shape[1:3]
    rows, groups, context = tokens // requests, heads // kv_heads, blocks * block_size

    index = block_table.flatten()
    keys, values = k_cache.index_select(0, index), v_cache.index_select(0, index)
    if scales is not None:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    keys = keys.view(requests, context, kv_heads, dim).transpose(1, 2)
    values = values.view(requests, context, kv_heads, dim).transpose(1, 2)

    key_positions = torch.arange(context, device=q.device, dtype=positions.dtype)
    row_positions = positions.view(requests, rows, 1)
    visible = key_positions <= row_positions
    live = key_positions <= row_positions.amax(1)
    if window is not None:
        visible = visible & (key_positions > row_positions - window)
        live = live & (key_positions > row_positions.amin(1) - window)
    # A stale NaN would survive a probability of zero, so what no row of the request sees is zeroed in V too.
    values = values.where(live.view(requests, 1, context, 1), 0)

    # A power of two is exact in every dtype and keeps half-precision scores from overflowing.
    power = 2.0 ** math.floor(math.log2(scale))
    queries = (q * power).view(requests, rows, kv_heads, groups, dim).permute(0, 2, 1, 3, 4)
    queries = queries.reshape(requests, kv_heads, rows * groups, dim)
    scores = (queries @ keys.transpose(2, 3)).float() * (scale / power)
    if scales is not None:
        scores = scores * scales.dequantize[0]
    scores = scores.view(requests, kv_heads, rows, groups, context)
    scores = scores.where(visible.view(requests, 1, rows, 1, context), -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.view(1, kv_heads, 1, groups, 1).expand(requests, -1, rows, -1, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1).narrow(-1, 0, context)
    weights = weights.to(q.dtype).reshape(requests, kv_heads, rows * groups, context)

    out = (weights @ values).view(requests, kv_heads, rows, groups, dim)
    if scales is not None:
        out = (out.float() * scales.dequantize[1]).to(q.dtype)
    return out.permute(0, 2, 1, 3, 4).reshape(tokens, heads, dim)
