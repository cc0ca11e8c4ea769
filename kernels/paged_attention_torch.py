"""Torch twin of `paged_attention`."""

import math
from collections.abc import Callable

import torch

from vllm_neuron.kernels.kv_fp8_torch import KVScales, require_scales

MOST_SCORES = 1 << 24
"""Scores of one head of a request that are made at once. A longer context is attended to in spans, one after the other,
so that memory does not grow with it: 64 MiB a head in float32."""


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
    rows, groups = tokens // requests, heads // kv_heads
    columns = max(1, MOST_SCORES // (rows * block_size))
    sink = None
    if sinks is not None:
        sink = sinks.view(1, kv_heads, 1, groups).expand(requests, -1, rows, -1)
        sink = sink.reshape(requests, kv_heads, rows * groups, 1)

    def look(table: torch.Tensor, first_block: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _look(q, k_cache, v_cache, table, first_block, positions, scale, window, scales)

    if blocks <= columns:
        scores, values = look(block_table, 0)
        weights = scores.softmax(-1) if sink is None else torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        out = weights.to(q.dtype) @ values
    else:
        out = _in_spans(look, block_table, columns, sink, q.dtype)
    if scales is not None:
        out = (out.float() * scales.dequantize[1]).to(q.dtype)
    out = out.view(requests, kv_heads, rows, groups, dim)
    return out.permute(0, 2, 1, 3, 4).reshape(tokens, heads, dim)


def _look(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    first_block: int,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    scales: KVScales | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [B, K, T / B * N / K, S] float32 of a part of the context, minus infinity for what a row does not see, and
    its values [B, K, S, D].

    Args:
        table: [B, S / BS], the part of the block table that starts with logical block `first_block`.
        q, k_cache, v_cache, positions, scale, window, scales: see `paged_attention`.
    """
    requests, (block_size, kv_heads, dim) = table.shape[0], k_cache.shape[1:]
    rows, groups, context = q.shape[0] // requests, q.shape[1] // kv_heads, table.shape[1] * block_size

    index = table.flatten()
    keys, values = k_cache.index_select(0, index), v_cache.index_select(0, index)
    if scales is not None:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    keys = keys.view(requests, context, kv_heads, dim).transpose(1, 2)
    values = values.view(requests, context, kv_heads, dim).transpose(1, 2)

    start = first_block * block_size
    key_positions = torch.arange(start, start + context, device=q.device, dtype=positions.dtype)
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
    return scores.view(requests, kv_heads, rows * groups, context), values


def _in_spans(
    look: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    block_table: torch.Tensor,
    columns: int,
    sink: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """softmax(scores) @ values over a context, `columns` blocks after the other, with a running maximum and sum (arXiv
    1805.02867), in `dtype`.

    Args:
        look: scores and values of a part of the block table that starts with a logical block, see `_look`.
        sink: [B, K, T / B * N / K, 1], scores without values; None is without.
    """
    top = sink
    total: torch.Tensor | float = 0.0 if sink is None else 1.0
    out: torch.Tensor | float = 0.0
    for first in range(0, block_table.shape[1], columns):
        table = block_table[:, first : first + columns]
        if isinstance(total, torch.Tensor):
            # Always the table itself. As a compiler cannot know that, it must not make the scores of all spans at once.
            table = table.where(~(total < 0).all(), 0)
        scores, values = look(table, first)
        highest = scores.amax(-1, keepdim=True)
        highest = highest if top is None else torch.maximum(top, highest)
        # As long as a row has seen nothing its maximum is minus infinity, which must not be subtracted from itself.
        shift = highest.where(highest > -torch.inf, 0)
        weights = (scores - shift).exp()
        shrink = 0.0 if top is None else (top - shift).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + (weights.to(dtype) @ values).float()
        top = highest
    assert isinstance(out, torch.Tensor)
    return (out / total).to(dtype)
