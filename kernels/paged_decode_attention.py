# mypy: disallow-untyped-defs=False
"""NKI kernel of `paged_attention` for steps with few rows per request (decode, verification of drafts).

The method is flash decoding (Dao et al. 2023): the softmax of a request runs over its context in tiles and carries
maximum, sum and result.

Layout. Rows of the cache, `run` tokens of one block each, are gathered one per partition, so that a DMA descriptor
moves up to ROW_BYTES. Keys are transposed by the Tensor Engine, whose time is free here, and are the stationary
operand: scores come out with the tokens on partitions, which the product with V contracts, so weights are never
transposed. Maxima and sums over the tokens, i.e. over partitions, go through the Tensor Engine and come out the same on
all partitions, so that rescaling is element-wise.

Rows that nobody sees are not loaded (index -1, skipped by the DMA), so HBM traffic follows the true length of a
request, not the length of its block table. V is masked bitwise, which removes NaN of recycled blocks too.

Roofline. Bound by DMA: 4 * S * K * D bytes per request in bfloat16 at 362 GB/s of a trn2 core, i.e. 1.45 us per 128
tokens of 8 heads of 128. In the same time the Tensor Engine works 8 * (160 transpose + 96 QK + 96 PV) cycles = 1.2 us,
the Vector Engine 0.9 us (half of the keys out of PSUM, mask of V, maxima) and the Scalar Engine 0.5 us (the other half,
exp). With head sizes below 128 or in float32 the Tensor Engine is the bound.

Never run on hardware. Times are estimates from documented formulas.
"""

from dataclasses import dataclass
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.paged_rows import P, Ring, check_arguments, gather_rows, part_of, row_indexes
from vllm_neuron.kernels.tiling import BANK, dtype_of, require, require_array

ROW_BYTES = 8192
"""Bytes of a gathered row at most, unless a block has more than 128 rows of them."""
BUFFER_BYTES = 32 * 1024
"""Bytes per partition for gathered keys, and as many for values."""
AHEAD = 2
"""Banks of transposed keys that leave PSUM while the Tensor Engine fills the next."""
FLOOR = -1e30
"""Score of what a row does not see. Finite, so that differences are."""


@dataclass(frozen=True)
class Shape(nl.NKIObject):
    """Sizes of one core's part.

    Attributes:
        requests, first_request: its requests.
        kv_heads, first_head: its KV heads.
        rows: query rows per request.
        group: query heads per KV head.
        dim: head size.
        size: bytes of an element.
        run: consecutive tokens in a gathered row.
        per_block: gathered rows of a block.
        tiles: gathers of 128 rows in a context.
        buffers: for gathered rows of one cache.
        all_kv_heads: of all cores.
    """

    requests: int
    first_request: int
    kv_heads: int
    first_head: int
    rows: int
    group: int
    dim: int
    size: int
    run: int
    per_block: int
    tiles: int
    buffers: int
    all_kv_heads: int

    @property
    def queries(self) -> int:
        """Query rows times heads of a request, ordered (KV head, row, head of the group)."""
        return self.kv_heads * self.rows * self.group


def paged_decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    positions: Any,
    scale: float,
    window: int | None = None,
    sinks: Any = None,
    mask: Any = None,
    lnc: int = 1,
) -> Any:
    """softmax(scale * q k^T) v over the blocks of each row's request, as the twin has it.

    Args:
        q: [T, N, D] bfloat16 or float32, T / B rows for each of B requests; query head n reads KV head n // (N / K).
        k_cache, v_cache: [NB, BS, K, D] in q's type.
        block_table: [B, S / BS] int32, physical block of each logical block.
        positions: [T] int32.
        scale: factor of the scores, more than 0.
        window: positions a row looks back on, its own included; None is all of them.
        sinks: [N] float32, a score per head that takes part in the softmax and has no value; None is without.
        mask: [T, S] uint8 as `decode_mask` makes it, which is loaded then; None works it out from positions and window.
        lnc: cores. Two compute half of the requests each, or of the KV heads where the requests are odd.

    Returns:
        [T, N, D] in q's type.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    check_paged_decode_attention(q, k_cache, v_cache, block_table, positions, scale, window, sinks, mask, lnc)
    return paged_decode_attention_kernel[lnc](q, k_cache, v_cache, block_table, positions, scale, window, sinks, mask)


def check_paged_decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    positions: Any,
    scale: float,
    window: int | None = None,
    sinks: Any = None,
    mask: Any = None,
    lnc: int = 1,
) -> None:
    """Raises ValueError if paged_decode_attention does not take these arguments."""
    check_arguments(q, k_cache, v_cache, block_table, positions, scale, window, sinks, lnc)
    block_size, context = k_cache.shape[1], block_table.shape[1] * k_cache.shape[1]
    require(block_size <= 4 * P, "k_cache", f"must have blocks of up to {4 * P} slots", block_size)
    part = shape_of(q, k_cache, block_table, dtype_of(q) == "float32", lnc, 0)
    require(part.queries <= P, "q", f"must have up to {P} rows times heads per request and core", part.queries)
    size = part.run * part.kv_heads * part.dim * part.size
    require(
        size <= BUFFER_BYTES, "k_cache", f"must have up to {BUFFER_BYTES} bytes in {part.run} slots of a core", size
    )
    if mask is not None:
        require_array("mask", mask, (q.shape[0], context), ("uint8",))


def shape_of(q: Any, k_cache: Any, block_table: Any, single: bool, cores: int, core: int) -> Shape:
    """The part of one core: half of the KV heads if the requests cannot be halved, else half of the requests."""
    requests, columns = block_table.shape
    kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    by_heads = requests % 2 == 1 and kv_heads % 2 == 0
    core_requests, first_request, core_heads, first_head = part_of(requests, kv_heads, by_heads, cores, core)
    size = 4 if single else 2
    rows, group, dim = q.shape[0] // requests, q.shape[1] // kv_heads, q.shape[2]
    queries = core_heads * rows * group
    run = max(1, block_size // P)
    while (
        2 * run <= block_size
        and columns * block_size % (2 * run * P) == 0
        and 2 * run * core_heads * dim * size <= ROW_BYTES
        and 2 * run * queries <= BANK
    ):
        run = 2 * run
    tiles = columns * block_size // (run * P)
    buffers = max(2, BUFFER_BYTES // (run * core_heads * dim * size))
    return Shape(
        core_requests, first_request, core_heads, first_head, rows, group, dim, size,
        run, block_size // run, tiles, buffers, kv_heads,
    )  # fmt: skip


@nki.jit
def paged_decode_attention_kernel(
    q, k_cache, v_cache, block_table, positions, scale, window=None, sinks=None, mask=None
):
    """paged_decode_attention on this core."""
    s = shape_of(q, k_cache, block_table, q.dtype == nl.float32, nl.num_programs(axes=0), nl.program_id(0))
    out = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm)
    if s.requests == 0:
        return out
    last = _last_positions(positions, s)
    index = row_indexes(block_table, positions, s, window)
    tokens = nl.ndarray((P, s.tiles * s.run), nl.float32)
    nisa.iota(dst=tokens, pattern=[[P * s.run, s.tiles], [1, s.run]], channel_multiplier=s.run)
    ones = nl.ndarray((P, P), q.dtype)
    nisa.memset(dst=ones, value=1.0)
    unit = _identity(s.queries)
    spread = nl.ndarray((s.queries, P), nl.float32)
    nisa.memset(dst=spread, value=1.0)
    keys, values = Ring(k_cache, s, s.buffers), Ring(v_cache, s, s.buffers)

    # The values of a tile are loaded and multiplied after the keys of the next one: what one tile's softmax waits for
    # on the Tensor Engine, the other's products fill.
    before = []
    for request in nl.affine_range(s.requests):
        queries = _transposed_queries(q, s, request)
        state = _State(s)
        if sinks != None:  # noqa: E711
            _start_at_sinks(state, sinks, scale, s)
        for number in nl.affine_range(s.tiles):
            tile = _Tile(request, number, state)
            gathered = gather_rows(keys, index, s, tile.request, tile.number)
            if len(before) > 0:
                before[0].values = gather_rows(values, index, s, before[0].request, before[0].number)
            if mask == None:  # noqa: E711
                _mask(tile, tokens, last, s, window)
            else:
                _load_mask(tile, mask, s)
            tile.keep = nl.ndarray((P, s.run), nl.int32 if s.size == 4 else nl.int16)
            nisa.tensor_reduce(dst=tile.keep, op=nl.maximum, data=tile.visible, axis=2, negate=True)
            scores = _multiply_keys(gathered, queries, s)
            half = s.run // 2
            if len(before) > 0:
                _clear_unseen(before[0], s)
                _add_values(before[0], s, 0, half)
            _find_highest(tile, scores, unit, s)
            if len(before) > 0:
                _add_values(before[0], s, half, s.run)
                _finish(before[0], ones, s, out)
            _weigh(tile, spread, q.dtype, scale, s)
            before = [tile]
    before[0].values = gather_rows(values, index, s, before[0].request, before[0].number)
    _clear_unseen(before[0], s)
    _add_values(before[0], s, 0, s.run)
    _finish(before[0], ones, s, out)
    return out


class _State(nl.NKIObject):
    """What the softmax of a request carries from step to step: maximum and sum per query, the same on all partitions,
    and the unnormalised result, transposed.
    """

    def __init__(self, s):
        self.top = None
        self.total = nl.ndarray((P, s.queries), nl.float32)
        self.result = nl.ndarray((s.dim, s.queries), nl.float32)


class _Tile(nl.NKIObject):
    """One gather of a request's context, on its way.

    Attributes:
        request, number: which.
        state: of the request.
        visible: uint8 [128, run, rows], what each row sees.
        keep: [128, run], -1 where any row sees, else 0, in integers of q's width.
        scores: float32 [128, run, queries], FLOOR where a row does not see.
        diagonal: float32 [queries, queries] with the highest score of each query.
        weights: [128, run, queries] in q's type.
        decay: float32 [128, queries], factor of what there was before; None where that was nothing.
        values: [128, run, heads, dim].
        product: weighted values [dim, queries], in PSUM.
    """

    def __init__(self, request, number, state):
        self.request, self.number, self.state = request, number, state
        self.visible, self.keep, self.scores, self.diagonal = None, None, None, None
        self.weights, self.decay, self.values, self.product = None, None, None, None


def _start_at_sinks(state, sinks, scale, s):
    """A sink is a first token of the softmax whose weight is 1 so far, and whose value is 0."""
    state.top = nl.ndarray((P, s.queries), nl.float32)
    pattern = [[0, P], [s.group, s.kv_heads], [0, s.rows], [1, s.group]]
    nisa.dma_copy(dst=state.top, src=sinks.ap(pattern=pattern, offset=s.first_head * s.group))
    nisa.tensor_scalar(dst=state.top, data=state.top, op0=nl.multiply, operand0=1.0 / scale)
    nisa.memset(dst=state.total, value=1.0)
    nisa.memset(dst=state.result, value=0.0)


def _identity(n):
    """float32 [n, n]."""
    made = nl.ndarray((n, n), nl.float32)
    nisa.iota(dst=made, pattern=[[1, n]], channel_multiplier=-1)
    nisa.tensor_scalar(dst=made, data=made, op0=nl.equal, operand0=0.0)
    return made


def _last_positions(positions, s):
    """float32 [128, requests * rows]: the last position that each row sees, on all partitions."""
    count = s.requests * s.rows
    raw = nl.ndarray((P, count), nl.int32)
    nisa.dma_copy(dst=raw, src=positions.ap(pattern=[[0, P], [1, count]], offset=s.first_request * s.rows))
    last = nl.ndarray((P, count), nl.float32)
    nisa.tensor_copy(dst=last, src=raw)
    return last


def _query_pattern(s, request, heads):
    """Pattern and offset of a request's part of [T, N, D], in the order (KV head, row, head of the group)."""
    pattern = [[s.group * s.dim, s.kv_heads], [heads * s.dim, s.rows], [s.dim, s.group], [1, s.dim]]
    offset = ((s.first_request + request) * s.rows * heads + s.first_head * s.group) * s.dim
    return pattern, offset


def _transposed_queries(q, s, request):
    """[D, queries] of one request."""
    pattern, offset = _query_pattern(s, request, q.shape[1])
    loaded = nl.ndarray((s.queries, s.dim), q.dtype)
    nisa.dma_copy(dst=loaded, src=q.ap(pattern=pattern, offset=offset))
    turned = nl.ndarray((s.dim, s.queries), q.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=loaded)
    queries = nl.ndarray((s.dim, s.queries), q.dtype)
    nisa.tensor_copy(dst=queries, src=turned)
    return queries


def _multiply_keys(gathered, queries, s):
    """k q^T of a tile's keys [128, run, heads, dim]: float32 [128, run, queries] in PSUM."""
    scores = nl.ndarray((P, s.run, s.queries), nl.float32, buffer=nl.psum)
    per_bank = 4 * BANK // (P * s.size)
    keys = [(token, head) for token in range(s.run) for head in range(s.kv_heads)]
    ready = []
    for number in nl.static_range(0, (len(keys) + per_bank - 1) // per_bank):
        part = keys[number * per_bank : (number + 1) * per_bank]
        turned = nl.ndarray((s.dim, len(part), P), gathered.dtype, buffer=nl.psum)
        for i in nl.static_range(len(part)):
            nisa.nc_transpose(dst=turned[:, i, :], data=gathered[:, part[i][0], part[i][1], :])
        copied = nl.ndarray((s.dim, len(part), P), gathered.dtype)
        nisa.tensor_copy(dst=copied, src=turned, engine=nisa.vector_engine if number % 2 == 0 else nisa.scalar_engine)
        ready.append((copied, part))
        # The Tensor Engine goes on with the next keys while these leave PSUM.
        if number >= AHEAD:
            _multiply_bank(scores, queries, ready[number - AHEAD], s)
    for waiting in ready[-AHEAD:]:
        _multiply_bank(scores, queries, waiting, s)
    return scores


def _multiply_bank(scores, queries, ready, s):
    """Scores of keys [D, n, 128], which belong to n (token, head)."""
    copied, part = ready
    width = s.rows * s.group
    for i in nl.static_range(len(part)):
        columns = nl.ds(part[i][1] * width, width)
        nisa.nc_matmul(
            dst=scores[:, part[i][0], columns], stationary=copied[:, i, :], moving=queries[:, columns],
            accumulate=False,
        )  # fmt: skip


def _mask(tile, tokens, last, s, window):
    """Which of a tile's tokens are visible."""
    part = tokens[:, nl.ds(tile.number * s.run, s.run)]
    tile.visible = nl.ndarray((P, s.run, s.rows), nl.uint8)
    for row in nl.static_range(s.rows):
        at = nl.ds(tile.request * s.rows + row, 1)
        seen = tile.visible[:, :, row]
        nisa.tensor_scalar(dst=seen, data=part, op0=nl.less_equal, operand0=last[:, at])
        if window != None:  # noqa: E711
            unseen = nl.ndarray((P, 1), nl.float32)
            nisa.tensor_scalar(dst=unseen, data=last[:, at], op0=nl.add, operand0=-float(window))
            nisa.scalar_tensor_tensor(
                dst=seen, data=part, op0=nl.greater, operand0=unseen, op1=nl.multiply, operand1=seen
            )


def _load_mask(tile, mask, s):
    """Which of a tile's tokens are visible, as a mask [T, S] says."""
    tile.visible = nl.ndarray((P, s.run, s.rows), nl.uint8)
    context = s.tiles * P * s.run
    first = (s.first_request + tile.request) * s.rows * context + tile.number * P * s.run
    for row in nl.static_range(s.rows):
        part = mask.ap(pattern=[[s.run, P], [1, s.run]], offset=first + row * context)
        nisa.dma_copy(dst=tile.visible[:, :, row], src=part)


def _find_highest(tile, scores, unit, s):
    """The highest visible score of each query on a diagonal: first along, then, transposed, over the partitions."""
    seen = tile.visible.expand_dim(2).broadcast(2, s.kv_heads).expand_dim(4).broadcast(4, s.group)
    tile.scores = nl.ndarray((P, s.run, s.queries), nl.float32)
    nisa.select_reduce(dst=tile.scores, predicate=seen, on_true=scores, on_false=FLOOR)
    top = nl.ndarray((P, s.queries), nl.float32)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=tile.scores.permute((0, 2, 1)), axis=2)
    turned = nl.ndarray((s.queries, P), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=top)
    highest = nl.ndarray((s.queries, 1), nl.float32)
    nisa.tensor_reduce(dst=highest, op=nl.maximum, data=turned, axis=1)
    tile.diagonal = nl.ndarray((s.queries, s.queries), nl.float32)
    nisa.tensor_scalar(dst=tile.diagonal, data=unit, op0=nl.multiply, operand0=highest)


def _weigh(tile, spread, dtype, scale, s):
    """exp(scale * (scores - highest so far)); a product of ones with the diagonal has it on all partitions."""
    everywhere = nl.ndarray((P, s.queries), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=everywhere, stationary=spread, moving=tile.diagonal, accumulate=False)
    state = tile.state
    raised = nl.ndarray((P, s.queries), nl.float32)
    if state.top == None:  # noqa: E711
        nisa.tensor_copy(dst=raised, src=everywhere)
    else:
        nisa.tensor_tensor(dst=raised, data1=state.top, data2=everywhere, op=nl.maximum)
        tile.decay = nl.ndarray((P, s.queries), nl.float32)
        nisa.tensor_tensor(dst=tile.decay, data1=state.top, data2=raised, op=nl.subtract)
        nisa.activation(dst=tile.decay, op=nl.exp, data=tile.decay, scale=scale)
    state.top = raised
    lowered = nl.ndarray((P, s.run, s.queries), nl.float32)
    nisa.tensor_tensor(dst=lowered, data1=tile.scores, data2=raised.expand_dim(1).broadcast(1, s.run), op=nl.subtract)
    tile.weights = nl.ndarray((P, s.run, s.queries), dtype)
    nisa.activation(dst=tile.weights, op=nl.exp, data=lowered, scale=scale)


def _clear_unseen(tile, s):
    """Zero in the values that no row sees, whatever they were: bitwise, as 0 * NaN is NaN."""
    bits = tile.values.reshape((P, s.run, s.kv_heads * s.dim)).view(tile.keep.dtype)
    for token in nl.static_range(s.run):
        part = bits[:, token, :]
        nisa.tensor_scalar(dst=part, data=part, op0=nl.bitwise_and, operand0=tile.keep[:, nl.ds(token, 1)])


def _add_values(tile, s, start, stop):
    """Weighted values of tokens `start` to `stop` of each row, summed over the partitions."""
    if tile.product == None:  # noqa: E711
        tile.product = nl.ndarray((s.dim, s.queries), nl.float32, buffer=nl.psum)
    width = s.rows * s.group
    for token in nl.static_range(start, stop):
        for head in nl.static_range(s.kv_heads):
            columns = nl.ds(head * width, width)
            nisa.nc_matmul(
                dst=tile.product[:, columns], stationary=tile.values[:, token, head, :],
                moving=tile.weights[:, token, columns], accumulate=token > 0,
            )  # fmt: skip


def _finish(tile, ones, s, out):
    """Add a tile's sums to those of its request, and after the last tile write the result."""
    state = tile.state
    total = nl.ndarray((P, s.queries), nl.float32, buffer=nl.psum)
    for token in nl.static_range(s.run):
        nisa.nc_matmul(dst=total, stationary=ones, moving=tile.weights[:, token, :], accumulate=token > 0)
    _accumulate(state.total, total, tile.decay)
    if tile.number == s.tiles - 1:
        nisa.reciprocal(dst=state.total, data=state.total)
    _accumulate(state.result, tile.product, tile.decay)
    if tile.number == s.tiles - 1:
        _write(out, state, s, tile.request)


def _accumulate(held, added, decay):
    """held = held * decay + added, where without a decay there is nothing held."""
    if decay == None:  # noqa: E711
        nisa.tensor_copy(dst=held, src=added)
    else:
        nisa.tensor_tensor(dst=held, data1=held, data2=decay[: held.shape[0]], op=nl.multiply)
        nisa.tensor_tensor(dst=held, data1=held, data2=added, op=nl.add)


def _write(out, state, s, request):
    """Divide by the total, whose reciprocal there is, and transpose back."""
    scaled = nl.ndarray((s.dim, s.queries), out.dtype)
    nisa.tensor_tensor(dst=scaled, data1=state.result, data2=state.total[: s.dim], op=nl.multiply)
    turned = nl.ndarray((s.queries, s.dim), out.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=scaled)
    rows = nl.ndarray((s.queries, s.dim), out.dtype)
    nisa.tensor_copy(dst=rows, src=turned)
    pattern, offset = _query_pattern(s, request, out.shape[1])
    nisa.dma_copy(dst=out.ap(pattern=pattern, offset=offset), src=rows)
