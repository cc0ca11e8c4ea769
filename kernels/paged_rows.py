# mypy: disallow-untyped-defs=False
"""What the attention kernels share: rows of the paged KV cache, gathered by the block tables.

A row is `run` consecutive tokens of a block with their heads, and a tile 128 rows, one a partition: token
(128 * tile + partition) * run + i of a context is the i-th of that partition. The shape `s` that these functions take
has the sizes of a core's part: requests from first_request on with `rows` query rows each, kv_heads of all_kv_heads
from first_head on, dim, tiles of a context, run, per_block rows of a block, and buffers.
"""

import nki.isa as nisa
import nki.language as nl

P = 128
"""Partitions."""
EXACT = 2**24
"""Integers up to here are exact in float32, in which the engines compute indexes."""


class Ring(nl.NKIObject):
    """Buffers for gathered rows of one cache, used in turn.

    A skipped row leaves what an earlier one left, which no result depends on, but it must be initialised.
    """

    def __init__(self, cache, s):
        self.rows = cache.reshape((cache.shape[0] * s.per_block, s.run * s.all_kv_heads * s.dim))
        self.buffers = []
        self.used = 0


def gather_rows(ring, index, s, request, tile):
    """[128, run, heads, dim]: the rows of one tile."""
    if len(ring.buffers) < s.buffers:
        fresh = nl.ndarray((P, s.run, s.kv_heads, s.dim), ring.rows.dtype)
        flat = fresh.reshape((P, s.run * s.kv_heads * s.dim)).view(nl.float32)
        nisa.memset(dst=flat, value=0.0, engine=nisa.gpsimd_engine)
        ring.buffers.append(fresh)
    buffer = ring.buffers[ring.used % s.buffers]
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
