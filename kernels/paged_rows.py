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

from vllm_neuron.kernels.tiling import EXACT, dtype_of, require, require_array, require_cores, require_window
from vllm_neuron.kernels.tiling import PARTITIONS as P


def check_arguments(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    positions: Any,
    scale: float,
    window: int | None,
    sinks: Any,
    lnc: int,
) -> None:
    """What both kernels ask of their arguments.

    Raises:
        ValueError: one breaks a rule.
    """
    require_cores(lnc)
    require_array("q", q, ("T", "N", "D"))
    require_array("k_cache", k_cache, ("NB", "BS", "K", q.shape[2]), (dtype_of(q),))
    require_array("v_cache", v_cache, tuple(k_cache.shape), (dtype_of(q),))
    require_array("block_table", block_table, ("B", "S / BS"), ("int32",))
    require_array("positions", positions, (q.shape[0],), ("int32",))
    tokens, heads, dim = q.shape
    blocks, block_size, kv_heads, _ = k_cache.shape
    requests, columns = block_table.shape
    require(dim % 2 == 0 and dim <= P, "q", f"must have an even head size of up to {P}", dim)
    require(heads % kv_heads == 0, "q", f"must have a multiple of the {kv_heads} heads of k_cache", heads)
    require(tokens % requests == 0, "q", f"must have as many rows for each of {requests} requests", f"{tokens} rows")
    require(block_size & (block_size - 1) == 0, "k_cache", "must have blocks of a power of two slots", block_size)
    span = columns * block_size
    require(span % P == 0, "block_table", f"must cover a multiple of {P} positions", span)
    require(blocks * block_size <= EXACT, "k_cache", f"must have up to {EXACT} slots", blocks * block_size)
    require(scale > 0, "scale", "must be more than 0", scale)
    require_window(window)
    if sinks is not None:
        require_array("sinks", sinks, (heads,), ("float32",))


def part_of(requests: int, kv_heads: int, by_heads: bool, cores: int, core: int) -> tuple[int, int, int, int]:
    """(requests, the first, KV heads, the first) of a core: two share the heads or, if not by_heads, the requests."""
    if cores == 1:
        return requests, 0, kv_heads, 0
    if by_heads:
        return requests, 0, kv_heads // 2, core * (kv_heads // 2)
    half = (requests + 1) // 2
    return half if core == 0 else requests - half, core * half, kv_heads, 0


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
