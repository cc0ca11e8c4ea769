# mypy: disallow-untyped-defs=False
"""What the attention kernels share: rows of the paged KV cache, gathered by the block tables.

A row is `run` consecutive tokens of a block with their heads, and a tile 128 rows, one a partition: token
(128 * tile + partition) * run + i of a context is the i-th of that partition. The shape `s` that these functions take
has the sizes of a core's part: requests from first_request on with `rows` query rows each, kv_heads of all_kv_heads
from first_head on, dim, tiles of a context, run, and per_block rows of a block.
"""

from typing import Any

import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.tiling import PARTITIONS, dtype_of

P = PARTITIONS
EXACT = 2**24
"""Integers up to here are exact in float32, in which the engines compute indexes."""


def check_arguments(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, positions: Any, scale: float, window: int | None, lnc: int
) -> None:
    """Whether the kernel takes these arguments.

    Raises:
        ValueError: it does not; with the argument and the rule.
    """
    names = {dtype_of(a) for a in (q, k_cache, v_cache)}
    if names not in ({"float32"}, {"bfloat16"}):
        raise ValueError(f"q, k_cache and v_cache are {', '.join(sorted(names))}: all must be float32 or all bfloat16")
    for name, array, axes in (
        ("q", q, "T, N, D"),
        ("k_cache", k_cache, "NB, BS, K, D"),
        ("block_table", block_table, "B, S / BS"),
    ):
        if len(array.shape) != len(axes.split(",")) or 0 in array.shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}: it must be [{axes}]")
    for name, array in (("block_table", block_table), ("positions", positions)):
        if dtype_of(array) != "int32":
            raise ValueError(f"{name} is {array.dtype}: it must be int32")
    if tuple(k_cache.shape) != tuple(v_cache.shape):
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)}: it must be that of k_cache, {tuple(k_cache.shape)}"
        )
    tokens, heads, dim = q.shape
    blocks, block_size, kv_heads, cache_dim = k_cache.shape
    requests, columns = block_table.shape
    if dim != cache_dim or not 2 <= dim <= P or dim % 2:
        raise ValueError(f"q has head size {dim}, k_cache {cache_dim}: both must be the same even number up to {P}")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads: it must be a multiple of the {kv_heads} of k_cache")
    if tokens % requests:
        raise ValueError(f"q has {tokens} rows: it must be a multiple of the {requests} requests of block_table")
    if tuple(positions.shape) != (tokens,):
        raise ValueError(f"positions has shape {tuple(positions.shape)}: it must be ({tokens},), one per row of q")
    if block_size & (block_size - 1):
        raise ValueError(f"k_cache has blocks of {block_size}: the block size must be a power of two")
    if columns * block_size % P:
        raise ValueError(f"block_table covers {columns * block_size} positions: it must be a multiple of {P}")
    if blocks * block_size > EXACT:
        raise ValueError(f"k_cache has {blocks * block_size} slots: indexes are exact up to {EXACT}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: it must be 1 or more, or None")
    if scale <= 0:
        raise ValueError(f"scale is {scale}: it must be more than 0")
    if lnc not in (1, 2):
        raise ValueError(f"lnc is {lnc}: it must be 1 or 2")


class Ring(nl.NKIObject):
    """Buffers for gathered rows of one cache, used in turn.

    A skipped row leaves what an earlier one left, which no result depends on, but it must be initialised.
    """

    def __init__(self, cache, s, count):
        self.rows = cache.reshape((cache.shape[0] * s.per_block, s.run * s.all_kv_heads * s.dim))
        self.buffers, self.count = [], count
        self.used = 0


def gather_rows(ring, index, s, request, tile):
    """[128, run, heads, dim]: the rows of one tile."""
    if len(ring.buffers) < ring.count:
        fresh = nl.ndarray((P, s.run, s.kv_heads, s.dim), ring.rows.dtype)
        flat = fresh.reshape((P, s.run * s.kv_heads * s.dim)).view(nl.float32)
        nisa.memset(dst=flat, value=0.0, engine=nisa.gpsimd_engine)
        ring.buffers.append(fresh)
    buffer = ring.buffers[ring.used % ring.count]
    ring.used = ring.used + 1
    column = request * s.tiles + tile
    width = s.all_kv_heads * s.dim
    source = ring.rows.ap(
        pattern=[[s.run * width, P], [width, s.run], [1, s.kv_heads * s.dim]],
        offset=s.first_head * s.dim,
        vector_offset=index[:, column : column + 1],
        indirect_dim=0,
    )
    nisa.dma_copy(dst=buffer, src=source, oob_mode=nisa.oob_mode.skip, dge_mode=nisa.dge_mode.swdge)
    return buffer


def row_indexes(block_table, positions, s, window):
    """int32 [128, requests * tiles]: which row of the cache each partition gathers, -1 where nobody sees it.

    Row r of a context lies in block r // per_block. With the tiles on partitions a table is read in one piece and
    expanded along the free dimension; one transpose brings the rows onto the partitions.
    """
    index = nl.ndarray((P, s.requests * s.tiles), nl.int32)
    several = max(1, P // s.tiles)
    for first in nl.static_range(0, s.requests, several):
        for tile in nl.static_range(0, s.tiles, P):
            many = min(several, s.requests - first)
            _expand_tables(index, block_table, positions, s, window, first, many, tile, min(P, s.tiles - tile))
    return index


def _expand_tables(index, block_table, positions, s, window, first, many, tile, tiles):
    """Columns of the index: `tiles` of `many` requests, a partition each."""
    lines, blocks, reach = many * tiles, P // s.per_block, P * s.run
    table = nl.ndarray((lines, blocks), nl.int32)
    request = s.first_request + first
    pattern = [[s.tiles * blocks, many], [blocks, tiles], [1, blocks]]
    nisa.dma_copy(dst=table, src=block_table.ap(pattern=pattern, offset=(request * s.tiles + tile) * blocks))
    raw = nl.ndarray((lines, s.rows), nl.int32)
    pattern = [[s.rows, many], [0, tiles], [1, s.rows]]
    nisa.dma_copy(dst=raw, src=positions.ap(pattern=pattern, offset=request * s.rows))

    # First token of each line: its number modulo `tiles`, for which there is no operator. Rounding to the nearest
    # integer of (line - (tiles - 1) / 2) / tiles is exact division, as no line is half way.
    line = nl.ndarray((lines, 1), nl.float32)
    nisa.iota(dst=line, pattern=[[1, 1]], channel_multiplier=1)
    quotient = nl.ndarray((lines, 1), nl.int32)
    nisa.tensor_scalar(
        dst=quotient, data=line, op0=nl.subtract, operand0=(tiles - 1) / 2, op1=nl.multiply, operand1=1.0 / tiles
    )
    start = nl.ndarray((lines, 1), nl.float32)
    nisa.tensor_scalar(
        dst=start, data=line, op0=nl.multiply, operand0=float(reach), op1=nl.add, operand1=float(tile * reach)
    )
    nisa.scalar_tensor_tensor(
        dst=start, data=quotient, op0=nl.multiply, operand0=-float(tiles * reach), op1=nl.add, operand1=start
    )

    token = nl.ndarray((lines, P), nl.float32)
    nisa.iota(dst=token, pattern=[[s.run, P]])
    bound = nl.ndarray((lines, 1), nl.float32)
    nisa.tensor_reduce(dst=bound, op=nl.maximum, data=raw, axis=1)
    nisa.tensor_tensor(dst=bound, data1=bound, data2=start, op=nl.subtract)
    seen = nl.ndarray((lines, P), nl.float32)
    nisa.tensor_scalar(dst=seen, data=token, op0=nl.less_equal, operand0=bound)
    if window != None:  # noqa: E711
        nisa.tensor_reduce(dst=bound, op=nl.minimum, data=raw, axis=1)
        nisa.tensor_tensor(dst=bound, data1=bound, data2=start, op=nl.subtract)
        nisa.tensor_scalar(dst=bound, data=bound, op0=nl.add, operand0=float(1 - s.run - window))
        nisa.scalar_tensor_tensor(dst=seen, data=token, op0=nl.greater, operand0=bound, op1=nl.multiply, operand1=seen)

    # One more than the row, so that what is not seen becomes 0, and -1 in the end.
    row = nl.ndarray((lines, P), nl.float32)
    offset = nl.ndarray((lines, P), nl.float32)
    nisa.iota(dst=offset, pattern=[[0, blocks], [1, s.per_block]], offset=1)
    nisa.scalar_tensor_tensor(
        dst=row, data=table.expand_dim(2).broadcast(2, s.per_block), op0=nl.multiply, operand0=float(s.per_block),
        op1=nl.add, operand1=offset,
    )  # fmt: skip
    nisa.tensor_tensor(dst=row, data1=row, data2=seen, op=nl.multiply)
    turned = nl.ndarray((P, lines), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=row)
    columns = nl.ds(first * s.tiles + tile, lines)
    nisa.tensor_scalar(dst=index[:, columns], data=turned, op0=nl.add, operand0=-1.0)
