"""NKI kernel of `norm_qkv_rope`: what comes before attention, in one pass over the hidden states.

Roofline: decode, the weights once from HBM (17.4 us for 4096 x 768 in bfloat16 at 362 GB/s); prefill, the product
(164 us for 2048 tokens at 78.6 TFLOP/s).

- Normalised hidden states are never written: gamma multiplies where the transposed rows leave PSUM, and the root mean
  square, a factor of a whole row of the product, where the product leaves PSUM.
- The Scalar Engine sums the squares while the Tensor Engine transposes.
- rope reads the product in PSUM: one instruction scales it and multiplies by cosines, another two do by sines with the
  halves of the head crosswise, two add.

Estimated at 70 % of it in prefill: a fifth of the Tensor Engine's time goes into transposes, and into loading the
stationary operand for the last 256 of 768 columns as for the others.

The product is of gamma * x rounded to x's type, where the twin's is of the normalised values rounded.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.projection import (
    CHUNKS,
    RESIDENT_BYTES,
    block_tokens,
    group_columns,
    item_bytes,
    load_columns,
    multiply,
    transpose_rows,
)
from vllm_neuron.kernels.tiling import (
    BANK,
    PARTITIONS,
    divisor,
    dtype_of,
    require,
    require_array,
    require_chunks,
    require_cores,
    share,
)


def norm_qkv_rope(
    x: Any, gamma: Any, eps: float, weight: Any, cos: Any, sin: Any, heads: int, lnc: int = 1
) -> tuple[Any, Any, Any]:
    """q [T, N, D], k and v [T, K, D] of the attention of x [T, H]: rms_norm, projection, rope of q and k.

    Args:
        x: [T, H], float32 or bfloat16.
        gamma: [H], weight of the norm; of x's type, as `weight`.
        eps: added to the mean of the squares.
        weight: [H, (N + 2 K) * D], the heads of q, then of k, then of v.
        cos, sin: [T, D/2], float32.
        heads: N.
        lnc: cores, which share the tokens.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    require_cores(lnc)
    require_array("x", x, ("T", "H"))
    tokens, hidden = x.shape
    require_array("gamma", gamma, (hidden,), (dtype_of(x),))
    require_array("weight", weight, (hidden, "O"), (dtype_of(x),))
    require_array("cos", cos, (tokens, "D/2"), ("float32",))
    require_array("sin", sin, tuple(cos.shape), ("float32",))
    dim, columns = 2 * cos.shape[1], weight.shape[1]
    require(dim <= BANK, "cos", f"must be of heads of up to {BANK}", dim)
    rest = columns // dim - heads
    holds = columns % dim == 0 and heads > 0 and rest > 0 and rest % 2 == 0
    require(holds, "weight", f"must have (N + 2 K) * {dim} columns with N = {heads}", columns)
    require_chunks("x", hidden, CHUNKS)
    q, k, v = norm_qkv_rope_kernel[lnc](x, gamma, float(eps), weight, cos, sin, heads)
    return q, k, v


@nki.jit
def norm_qkv_rope_kernel(x, gamma, eps, weight, cos, sin, heads):
    """norm_qkv_rope of x [T, H]."""
    hidden, outputs = weight.shape
    dim = 2 * cos.shape[1]
    kv_heads = (outputs // dim - heads) // 2
    q = nl.ndarray((x.shape[0], heads, dim), x.dtype, buffer=nl.shared_hbm)
    k = nl.ndarray((x.shape[0], kv_heads, dim), x.dtype, buffer=nl.shared_hbm)
    v = nl.ndarray((x.shape[0], kv_heads, dim), x.dtype, buffer=nl.shared_hbm)
    first, count = share(x.shape[0])
    if count == 0:
        return q, k, v
    lanes = divisor(hidden, PARTITIONS)
    loaded = nl.ndarray((lanes, hidden // lanes), gamma.dtype)
    nisa.dma_copy(dst=loaded, src=gamma.ap(pattern=[[hidden // lanes, lanes], [1, hidden // lanes]]))
    factor = nl.ndarray((lanes, hidden // lanes), nl.float32)
    nisa.tensor_copy(dst=factor, src=loaded)
    tile = BANK // dim * dim  # whole heads
    size = min(count, block_tokens(x))
    resident = hidden // lanes * outputs * item_bytes(weight) <= RESIDENT_BYTES
    columns = group_columns(weight, lanes, size, tile)
    kept = []
    for number in nl.affine_range((count + size - 1) // size):
        token = first + number * size
        tokens = min(size, first + count - token)
        turned = nl.ndarray((lanes, hidden // lanes, tokens), x.dtype)
        scales = _transposed(turned, x, factor, eps, lanes, token)
        cosines, sines = _rows_of(cos, token, tokens), _rows_of(sin, token, tokens)
        for group in nl.affine_range((outputs + columns - 1) // columns):
            column = group * columns
            width = min(columns, outputs - column)
            parts = kept[group] if resident and number > 0 else load_columns(weight, lanes, True, column, width)
            if number == 0:
                kept.append(parts)
            sums = multiply(turned, parts, tokens, tile)
            _store(q, k, v, sums, scales, cosines, sines, token, tokens, column, width)
    return q, k, v


def _transposed(turned, x, factor, eps, lanes, token):
    """Rows of x from `token` on, times gamma, into `turned` [lanes, C, T']; one over their root mean square."""
    tokens, hidden = turned.shape[2], x.shape[1]
    scales = []
    for t in nl.affine_range((tokens + PARTITIONS - 1) // PARTITIONS):
        height = min(PARTITIONS, tokens - t * PARTITIONS)
        rows = nl.ndarray((height, hidden), x.dtype)
        nisa.dma_copy(dst=rows, src=x[nl.ds(token + t * PARTITIONS, height)])
        transpose_rows(turned[:, :, nl.ds(t * PARTITIONS, height)], rows, lanes, factor)
        squares = nl.ndarray((height, hidden), x.dtype)
        sums = nl.ndarray((height, 1), nl.float32)
        nisa.activation(
            dst=squares,
            op=nl.square,
            data=rows,
            reduce_op=nl.add,
            reduce_res=sums,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        scale = nl.ndarray((height, 1), nl.float32)
        nisa.activation(dst=scale, op=nl.rsqrt, data=sums, scale=1.0 / hidden, bias=eps)
        scales.append(scale)
    return scales


def _rows_of(table, token, tokens):
    """Rows of a table from `token` on, as a list of tiles of up to 128."""
    tiles = []
    for t in nl.affine_range((tokens + PARTITIONS - 1) // PARTITIONS):
        height = min(PARTITIONS, tokens - t * PARTITIONS)
        tile = nl.ndarray((height, table.shape[1]), table.dtype)
        nisa.dma_copy(dst=tile, src=table[nl.ds(token + t * PARTITIONS, height)])
        tiles.append(tile)
    return tiles


def _store(q, k, v, sums, scales, cosines, sines, token, tokens, column, columns):
    """The product of some columns, scaled and rotated, to the tensors that their heads belong to."""
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    step = BANK // dim
    wide = (columns // dim + step - 1) // step
    for t in nl.affine_range((tokens + PARTITIONS - 1) // PARTITIONS):
        start, height = token + t * PARTITIONS, min(PARTITIONS, tokens - t * PARTITIONS)
        for j in nl.affine_range(wide):
            head = column // dim + j * step
            some = min(step, columns // dim - j * step)
            product = sums[0:height, t * wide + j, 0 : some * dim].reshape((height, some, 2, dim // 2))
            tile = nl.ndarray((height, some, 2, dim // 2), q.dtype)
            turning = max(0, min(some, heads + kv_heads - head))
            if turning > 0:
                _rotate(tile[:, 0:turning], product[:, 0:turning], scales[t], cosines[t], sines[t])
            if turning < some:
                nisa.activation(dst=tile[:, turning:some], op=nl.copy, data=product[:, turning:some], scale=scales[t])
            _part(q, tile, 0, head, start)
            _part(k, tile, heads, head, start)
            _part(v, tile, heads + kv_heads, head, start)


def _part(out, tile, base, head, start):
    """Those heads of a tile, which begins with head `head`, that are the heads from `base` on of `out` [T, .., D]."""
    height, some = tile.shape[0], tile.shape[1]
    low, high = max(head, base), min(head + some, base + out.shape[1])
    if low < high:
        whole = tile.reshape((height, some, out.shape[2]))
        nisa.dma_copy(
            dst=out[nl.ds(start, height), nl.ds(low - base, high - low)], src=whole[:, nl.ds(low - head, high - low)]
        )


def _rotate(out, product, scale, cosines, sines):
    """out [P, heads, 2, D/2] = scale * product, rotated."""
    height, heads, half = product.shape[0], product.shape[1], product.shape[3]
    direct = nl.ndarray((height, heads, 2, half), nl.float32)
    nisa.scalar_tensor_tensor(
        dst=direct,
        data=product,
        op0=nl.multiply,
        operand0=scale,
        op1=nl.multiply,
        operand1=cosines.ap(pattern=[[half, height], [0, 2 * heads], [1, half]]),
    )
    # Not in PSUM, where the sum would read it faster: the next group's product would wait for the room.
    crossed = nl.ndarray((height, heads, 2, half), nl.float32)
    for part in nl.static_range(2):
        nisa.scalar_tensor_tensor(
            dst=crossed[:, :, part],
            data=product[:, :, 1 - part],
            op0=nl.multiply,
            operand0=scale,
            op1=nl.multiply,
            operand1=sines.ap(pattern=[[half, height], [0, heads], [1, half]]),
        )
    nisa.tensor_tensor(dst=out[:, :, 0], data1=direct[:, :, 0], data2=crossed[:, :, 0], op=nl.subtract)
    nisa.tensor_tensor(dst=out[:, :, 1], data1=direct[:, :, 1], data2=crossed[:, :, 1], op=nl.add)
