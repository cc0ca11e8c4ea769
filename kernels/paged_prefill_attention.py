# mypy: disallow-untyped-defs=False
"""NKI kernel of `paged_attention` for steps with many rows per request: prefill, whole or a segment after earlier KV.

The method is flash attention (Dao 2023): blocks of query rows stay in SBUF while the context passes in steps of STEP
keys, and the softmax carries maximum, sum and result. Positions are known at run time only, so every step is computed
and masked; rows of the cache that no row sees are not loaded.

Layout. Scores have the query rows on partitions, so that one instruction of the Vector Engine masks them by position
(causal and window) and finds their maximum, and one of the Scalar Engine takes exponentials and their sum. The weights
are transposed for the product with V: five of eight tiles by DMA, which has time, the rest by the Tensor Engine, out of
whose PSUM they must be copied.

Roofline. Bound by the Vector and Scalar Engines. Per 128 rows of a head and 1024 keys in bfloat16 the products take
2048 cycles at the peak, 0.85 us; the Vector Engine 1.07 us (mask and maximum) + 0.20 us (shift and result), the Scalar
Engine 0.91 us (exp) + 0.37 us (weights out of PSUM, decay), the Tensor Engine 1.2 us with its transposes, the DMA
engines 1.0 us. The ceiling is 67 % of the peak of the Tensor Engine. float32 products take four passes.

Never run on hardware. Times are estimates from documented formulas.
"""

from dataclasses import dataclass
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.paged_rows import P, Ring, check_arguments, gather_rows, part_of, row_indexes
from vllm_neuron.kernels.tiling import BANK, dtype_of, require

STEP_BYTES = 2048
"""Keys of a step times bytes of an element."""
VALUE_BYTES = 16 * 1024
"""Bytes per partition of a step's values at most; there is room for two steps, and for their keys."""
BLOCK_BYTES = 96 * 1024
"""Bytes per partition for the queries and results of a block of rows."""
HIGHEST_SHIFT = 1e30
"""-scale times the highest score before there is one. Finite, so that differences are."""
TRANSPOSE, MULTIPLY, FINISH = 2, 4, 5
"""After how many rows of heads weights are transposed, multiplied with the values and added up."""


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
        run, per_block, tiles: see paged_rows.py; a row is one token here.
        all_kv_heads: of all cores.
        step: tiles of a step.
        block: tiles of 128 query rows in a block.
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
    all_kv_heads: int
    step: int
    block: int


def paged_prefill_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    positions: Any,
    scale: float,
    window: int | None = None,
    sinks: Any = None,
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
        lnc: cores. Two compute half of the KV heads each, or of the requests where the heads are odd.

    Returns:
        [T, N, D] in q's type.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    check_paged_prefill_attention(q, k_cache, v_cache, block_table, positions, scale, window, sinks, lnc)
    return paged_prefill_attention_kernel[lnc](q, k_cache, v_cache, block_table, positions, scale, window, sinks)


def check_paged_prefill_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    positions: Any,
    scale: float,
    window: int | None = None,
    sinks: Any = None,
    lnc: int = 1,
) -> None:
    """Raises ValueError if paged_prefill_attention does not take these arguments."""
    check_arguments(q, k_cache, v_cache, block_table, positions, scale, window, sinks, lnc)
    block_size, (_, heads, dim) = k_cache.shape[1], q.shape
    require(block_size <= P, "k_cache", f"must have blocks of up to {P} slots", block_size)
    size = 4 if dtype_of(q) == "float32" else 2
    parts = 2 if lnc == 2 and k_cache.shape[2] % 2 == 0 else 1
    queries, values = heads // parts * (dim * 4 + P * size), k_cache.shape[2] // parts * dim * size
    rule = f"must have heads of up to {BLOCK_BYTES} bytes per partition of a core"
    require(queries <= BLOCK_BYTES, "q", rule, f"{queries} of {heads} heads of {dim}")
    require(values <= VALUE_BYTES, "k_cache", f"must have slots of up to {VALUE_BYTES} bytes on a core", values)


def _shape_of(q, k_cache, block_table, lnc, core):
    """The part of one core: half of the KV heads if they can be halved, else half of the requests."""
    requests, columns = block_table.shape
    kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    core_requests, first_request, core_heads, first_head = part_of(requests, kv_heads, kv_heads % 2 == 0, lnc, core)
    size = 4 if q.dtype == nl.float32 else 2
    rows, group, dim = q.shape[0] // requests, q.shape[1] // kv_heads, q.shape[2]
    tiles = columns * block_size // P
    step = min(STEP_BYTES // size // P, VALUE_BYTES // (core_heads * dim * size))
    block = min((rows + P - 1) // P, BLOCK_BYTES // (core_heads * group * (dim * 4 + P * size)))
    return Shape(
        core_requests, first_request, core_heads, first_head, rows, group, dim, size,
        1, block_size, tiles, kv_heads, min(step, tiles), block,
    )  # fmt: skip


@nki.jit
def paged_prefill_attention_kernel(q, k_cache, v_cache, block_table, positions, scale, window=None, sinks=None):
    """paged_prefill_attention on this core."""
    s = _shape_of(q, k_cache, block_table, nl.num_programs(axes=0), nl.program_id(0))
    out = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm)
    if s.requests == 0:
        return out
    index = row_indexes(block_table, positions, s, window)
    keys, values = Ring(k_cache, s, 4), Ring(v_cache, s, 2 * s.step)
    for request in nl.affine_range(s.requests):
        source = _Source(keys, values, index, _seen_tokens(positions, s, window, request), request)
        for first in nl.static_range(0, s.rows, s.block * P):
            starts = list(range(first, min(first + s.block * P, s.rows), P))
            parts = [_Part(q, positions, sinks, s, window, request, start) for start in starts]
            context = _Context(0, s, q.dtype)
            for i in nl.static_range(context.tiles):
                _load(source, context, i, s)
            for tile in nl.static_range(0, s.tiles, s.step):
                following = None
                if tile + s.step < s.tiles:
                    following = _Context(tile + s.step, s, q.dtype)
                _attend(parts, source, context, following, scale, s)
                context = following
            for part in parts:
                _write(out, part, s, request)
    return out


class _Source(nl.NKIObject):
    """Where keys and values of a request come from."""

    def __init__(self, keys, values, index, keep, request):
        self.keys, self.values, self.index, self.keep, self.request = keys, values, index, keep, request


class _Context(nl.NKIObject):
    """Keys [D, heads, tiles * 128] and values (tiles of [128, 1, heads, D]) of a step, from tile `first` on."""

    def __init__(self, first, s, dtype):
        self.first, self.tiles = first, min(s.step, s.tiles - first)
        self.keys = nl.ndarray((s.dim, s.kv_heads, self.tiles * P), dtype)
        self.values = []


def _alternate(number):
    """The Scalar and the Vector Engine in turn."""
    return nisa.scalar_engine if number % 2 == 0 else nisa.vector_engine


class _Part(nl.NKIObject):
    """128 query rows of a request, or what is left.

    Attributes:
        start, count: first row and their number.
        queries: [D, heads, count].
        last, before: float32 [count, 1], the last position a row sees and the last before its window.
        shifts: float32 [count, 1] for each head, -scale times the highest score so far.
        total, added, decay: float32 [count, heads], sum of the weights, what a step adds to it, and its factor before.
        result: float32 [count, heads, D], not divided by the sum yet.
    """

    def __init__(self, q, positions, sinks, s, window, request, start):
        heads = s.kv_heads * s.group
        self.start, self.count = start, min(P, s.rows - start)
        token = (s.first_request + request) * s.rows + start
        raw = nl.ndarray((self.count, 1), nl.int32)
        nisa.dma_copy(dst=raw, src=positions[nl.ds(token, self.count)])
        self.last, self.before = nl.ndarray((self.count, 1), nl.float32), nl.ndarray((self.count, 1), nl.float32)
        nisa.tensor_copy(dst=self.last, src=raw)
        back = -1e9 if window == None else -float(window)  # noqa: E711
        nisa.tensor_scalar(dst=self.before, data=self.last, op0=nl.add, operand0=back)
        loaded = nl.ndarray((self.count, heads, s.dim), q.dtype)
        first = s.first_head * s.group
        nisa.dma_copy(dst=loaded, src=q[nl.ds(token, self.count), nl.ds(first, heads), :])
        self.queries = nl.ndarray((s.dim, heads, self.count), q.dtype)
        for head in nl.static_range(heads):
            turned = nl.ndarray((s.dim, self.count), q.dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=turned, data=loaded[:, head, :])
            nisa.tensor_copy(dst=self.queries[:, head, :], src=turned, engine=_alternate(head))
        # A sink is a first token of the softmax whose weight is 1 so far, and whose value is 0.
        shifts = nl.ndarray((self.count, heads), nl.float32)
        if sinks == None:  # noqa: E711
            nisa.memset(dst=shifts, value=HIGHEST_SHIFT)
        else:
            nisa.dma_copy(dst=shifts, src=sinks.ap(pattern=[[0, self.count], [1, heads]], offset=first))
            nisa.tensor_scalar(dst=shifts, data=shifts, op0=nl.multiply, operand0=-1.0)
        self.shifts = [shifts[:, head : head + 1] for head in range(heads)]
        self.total = nl.ndarray((self.count, heads), nl.float32)
        self.added, self.decay = None, None
        self.result = nl.ndarray((self.count, heads, s.dim), nl.float32)
        nisa.memset(dst=self.total, value=0.0 if sinks == None else 1.0)  # noqa: E711
        nisa.memset(dst=self.result, value=0.0, engine=nisa.gpsimd_engine)


class _Step(nl.NKIObject):
    """128 rows of one head in one step, on its way.

    Attributes:
        part, head: which.
        scores: float32 [count, keys], in PSUM.
        masked, highest: float32 [count, keys] and [count, 1], the scores that are visible and their maximum.
        weights: [count, keys] in q's type.
        decay: float32 [count, 1], factor of the sums so far.
        turned: [128, tiles, count], the weights transposed.
        product: float32 [count, D], in PSUM.
    """

    def __init__(self, part, head):
        self.part, self.head = part, head
        self.scores, self.masked, self.highest, self.weights = None, None, None, None
        self.decay, self.turned, self.product = None, None, None


def _seen_tokens(positions, s, window, request):
    """[128, tiles]: -1 where any row of a request sees token 128 * tile + partition, else 0, integers of q's width."""
    raw = nl.ndarray((P, s.rows), nl.int32)
    pattern = [[0, P], [1, s.rows]]
    nisa.dma_copy(dst=raw, src=positions.ap(pattern=pattern, offset=(s.first_request + request) * s.rows))
    bound = nl.ndarray((P, 1), nl.float32)
    nisa.tensor_reduce(dst=bound, op=nl.maximum, data=raw, axis=1)
    token = nl.ndarray((P, s.tiles), nl.float32)
    nisa.iota(dst=token, pattern=[[P, s.tiles]], channel_multiplier=1)
    seen = nl.ndarray((P, s.tiles), nl.float32)
    nisa.tensor_scalar(dst=seen, data=token, op0=nl.less_equal, operand0=bound)
    if window != None:  # noqa: E711
        nisa.tensor_reduce(dst=bound, op=nl.minimum, data=raw, axis=1)
        nisa.tensor_scalar(dst=bound, data=bound, op0=nl.add, operand0=-float(window))
        nisa.scalar_tensor_tensor(dst=seen, data=token, op0=nl.greater, operand0=bound, op1=nl.multiply, operand1=seen)
    keep = nl.ndarray((P, s.tiles), nl.int32 if s.size == 4 else nl.int16)
    nisa.tensor_scalar(dst=keep, data=seen, op0=nl.multiply, operand0=-1.0)
    return keep


def _load(source, context, i, s):
    """Tile i of a step: its keys transposed, its values 0 (bitwise, as 0 * NaN is NaN) where no row sees them."""
    tile = context.first + i
    gathered = gather_rows(source.keys, source.index, s, source.request, tile)
    values = gather_rows(source.values, source.index, s, source.request, tile)
    for head in nl.static_range(0, s.kv_heads, 4):
        count = min(4, s.kv_heads - head)
        turned = nl.ndarray((s.dim, count, P), gathered.dtype, buffer=nl.psum)
        for j in nl.static_range(count):
            nisa.nc_transpose(dst=turned[:, j, :], data=gathered[:, 0, head + j, :])
        part = context.keys[:, nl.ds(head, count), nl.ds(i * P, P)]
        nisa.tensor_copy(dst=part, src=turned, engine=_alternate(i))
    bits = values.reshape((P, s.kv_heads * s.dim)).view(source.keep.dtype)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.bitwise_and, operand0=source.keep[:, nl.ds(tile, 1)])
    context.values.append(values)


def _attend(parts, source, context, following, scale, s):
    """One step of all heads and rows of a block; keys and values of the following one are prepared along the way.

    The engines work in order, so each instruction is emitted as many rows of heads after what it needs as that takes.
    """
    for part in parts:
        part.added, part.decay = nl.ndarray(part.total.shape, nl.float32), nl.ndarray(part.total.shape, nl.float32)
    steps = [_Step(part, head) for head in range(s.kv_heads * s.group) for part in parts]
    for i in nl.static_range(len(steps) + FINISH):
        if i < len(steps):
            _score(steps[i], context, s)
        if i >= FINISH:
            _accumulate(steps[i - FINISH])
        if i < len(steps):
            _weigh(steps[i], context.keys.dtype, scale)
        if 0 <= i - TRANSPOSE < len(steps):
            _transpose(steps[i - TRANSPOSE], context.tiles)
        if 0 <= i - MULTIPLY < len(steps):
            _multiply_values(steps[i - MULTIPLY], context.values, s)
        if following != None and i < len(steps):  # noqa: E711
            for tile in range(i * following.tiles // len(steps), (i + 1) * following.tiles // len(steps)):
                _load(source, following, tile, s)
    for part in parts:
        nisa.tensor_tensor(dst=part.total, data1=part.total, data2=part.decay, op=nl.multiply)
        nisa.tensor_tensor(dst=part.total, data1=part.total, data2=part.added, op=nl.add)


def _score(step, context, s):
    """Scores of 128 rows and a step's keys: those that are visible, and the highest."""
    part, keys = step.part, context.keys
    size = keys.shape[2]
    step.scores = nl.ndarray((part.count, size), nl.float32, buffer=nl.psum)
    for start in nl.static_range(0, size, BANK):
        columns = nl.ds(start, min(BANK, size - start))
        nisa.nc_matmul(
            dst=step.scores[:, columns], stationary=part.queries[:, step.head, :],
            moving=keys[:, step.head // s.group, columns], accumulate=False,
        )  # fmt: skip
    step.masked, step.highest = nl.ndarray((part.count, size), nl.float32), nl.ndarray((part.count, 1), nl.float32)
    nisa.range_select(
        dst=step.masked, on_true_tile=step.scores, comp_op0=nl.less_equal, comp_op1=nl.greater, bound0=part.last,
        bound1=part.before, reduce_cmd=nisa.reduce_cmd.reset_reduce, reduce_res=step.highest, reduce_op=nl.maximum,
        range_start=context.first * P,
    )  # fmt: skip


def _weigh(step, dtype, scale):
    """exp(scale * (scores - highest so far)) and what that makes of the weights before, exp(scale * (old - new))."""
    count, old = step.part.count, step.part.shifts[step.head]
    shift = nl.ndarray((count, 1), nl.float32)
    nisa.scalar_tensor_tensor(
        dst=shift, data=step.highest, op0=nl.multiply, operand0=-scale, op1=nl.minimum, operand1=old
    )
    step.part.shifts[step.head] = shift
    step.decay = step.part.decay[:, step.head : step.head + 1]
    added = step.part.added[:, step.head : step.head + 1]
    step.weights = nl.ndarray(step.masked.shape, dtype)
    nisa.activation_reduce(
        dst=step.weights, op=nl.exp, data=step.masked, reduce_op=nl.add, reduce_res=added, bias=shift, scale=scale
    )
    nisa.activation(dst=step.decay, op=nl.exp, data=old, bias=shift, scale=-1.0)


def _transpose(step, tiles):
    """The weights with the keys on partitions: most by DMA, the rest by the Tensor Engine."""
    step.turned = nl.ndarray((P, tiles, step.part.count), step.weights.dtype)
    by_dma = tiles * 5 // 8
    for i in nl.static_range(by_dma):
        nisa.dma_transpose(dst=step.turned[:, i, :], src=step.weights[:, nl.ds(i * P, P)])
    for start in nl.static_range(by_dma, tiles, 4):
        several = min(4, tiles - start)
        psum = nl.ndarray((P, several, step.part.count), step.turned.dtype, buffer=nl.psum)
        for i in nl.static_range(several):
            nisa.nc_transpose(dst=psum[:, i, :], data=step.weights[:, nl.ds((start + i) * P, P)])
        nisa.tensor_copy(dst=step.turned[:, nl.ds(start, several), :], src=psum, engine=nisa.scalar_engine)


def _multiply_values(step, values, s):
    """weights V."""
    step.product = nl.ndarray((step.part.count, s.dim), nl.float32, buffer=nl.psum)
    for i in nl.static_range(len(values)):
        nisa.nc_matmul(
            dst=step.product, stationary=step.turned[:, i, :], moving=values[i][:, 0, step.head // s.group, :],
            accumulate=i > 0,
        )  # fmt: skip


def _accumulate(step):
    """Add to the result so far."""
    result = step.part.result[:, step.head, :]
    nisa.scalar_tensor_tensor(
        dst=result, data=result, op0=nl.multiply, operand0=step.decay, op1=nl.add, operand1=step.product
    )


def _write(out, part, s, request):
    """result / total."""
    heads = s.kv_heads * s.group
    nisa.reciprocal(dst=part.total, data=part.total)
    rows = nl.ndarray((part.count, heads, s.dim), out.dtype)
    for head in nl.static_range(heads):
        factor = part.total[:, head : head + 1]
        nisa.tensor_scalar(
            dst=rows[:, head, :], data=part.result[:, head, :], op0=nl.multiply, operand0=factor,
            engine=_alternate(head),
        )  # fmt: skip
    token = (s.first_request + request) * s.rows + part.start
    nisa.dma_copy(dst=out[nl.ds(token, part.count), nl.ds(s.first_head * s.group, heads), :], src=rows)
