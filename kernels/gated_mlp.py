"""NKI kernel of `gated_mlp`.

Roofline: decode, the weights once from HBM (121 us for 4096 x 1792 in bfloat16 at 362 GB/s); prefill, the products
(1147 us for 2048 tokens at 78.6 TFLOP/s).

Both products take the activations as they come out of the one before, so that nothing but the input is transposed:

- gate and up: the weights are stationary and the tokens move, which leaves the intermediate dimension on partitions;
- down: the intermediate values are stationary and the weights move, which leaves the tokens on partitions.

Weights are streamed once for every 512 tokens, in an order in which they are used as they arrive; 2048 tokens read them
four times, which is less than the time of the products. silu runs on the Scalar Engine, its product on the Vector
Engine, both straight out of PSUM.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.projection import (
    CHUNKS,
    block_tokens,
    chunks_per_load,
    group_columns,
    load_columns,
    load_weight,
    multiply,
    store_product,
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

GATE_BANKS = 2
"""Banks of PSUM that gate accumulates in, and up as well."""


def gated_mlp(x: Any, gate_up: Any, down: Any, lnc: int = 1) -> Any:
    """(silu(x gate) * (x up)) down: [T, H] in x's type, products summed in float32.

    Args:
        x: [T, H], float32 or bfloat16.
        gate_up: [H, 2I], gate first; of x's type, as `down`.
        down: [I, H].
        lnc: cores, which share the tokens.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    require_cores(lnc)
    require_array("x", x, ("T", "H"))
    hidden = x.shape[1]
    require_array("gate_up", gate_up, (hidden, "2I"), (dtype_of(x),))
    require(gate_up.shape[1] % 2 == 0, "gate_up", "must have as many columns for gate as for up", gate_up.shape[1])
    inner = gate_up.shape[1] // 2
    require_array("down", down, (inner, hidden), (dtype_of(x),))
    require_chunks("x", hidden, CHUNKS)
    require_chunks("down", inner, CHUNKS)
    return gated_mlp_kernel[lnc](x, gate_up, down)


@nki.jit
def gated_mlp_kernel(x, gate_up, down):
    """gated_mlp of x [T, H]."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    first, count = share(x.shape[0])
    size = block_tokens(x)
    for number in nl.affine_range((count + size - 1) // size):
        token = first + number * size
        _block(x, gate_up, down, out, token, min(size, first + count - token))
    return out


def _block(x, gate_up, down, out, token, tokens):
    hidden, inner = x.shape[1], down.shape[0]
    lanes = divisor(hidden, PARTITIONS)
    turned = nl.ndarray((lanes, hidden // lanes, tokens), x.dtype)
    for t in nl.affine_range((tokens + PARTITIONS - 1) // PARTITIONS):
        height = min(PARTITIONS, tokens - t * PARTITIONS)
        rows = nl.ndarray((height, hidden), x.dtype)
        nisa.dma_copy(dst=rows, src=x[nl.ds(token + t * PARTITIONS, height)])
        transpose_rows(turned[:, :, nl.ds(t * PARTITIONS, height)], rows, lanes)

    rows_of_down = divisor(inner, PARTITIONS)
    middle = nl.ndarray((rows_of_down, inner // rows_of_down, tokens), x.dtype)
    pack = BANK // tokens
    group = GATE_BANKS * pack
    for number in nl.affine_range((inner // rows_of_down + group - 1) // group):
        start = number * group
        _gate_and_up(turned, gate_up, middle, start, min(group, inner // rows_of_down - start), pack)

    columns = group_columns(down, rows_of_down, tokens, BANK)
    for number in nl.affine_range((hidden + columns - 1) // columns):
        column = number * columns
        width = min(columns, hidden - column)
        parts = load_columns(down, rows_of_down, False, column, width)
        store_product(out, multiply(middle, parts, tokens, BANK), token, tokens, column, width)


def _gate_and_up(turned, gate_up, middle, start, tiles, pack):
    """Tiles of the intermediate dimension from `start` on, `pack` of them in a bank of PSUM."""
    lanes, chunks, tokens = turned.shape
    height = middle.shape[0]
    inner = gate_up.shape[1] // 2
    gate = nl.ndarray((height, GATE_BANKS, BANK), nl.float32, buffer=nl.psum)
    up = nl.ndarray((height, GATE_BANKS, BANK), nl.float32, buffer=nl.psum)
    step = chunks_per_load(gate_up, lanes, tiles * height)
    for load in nl.affine_range((chunks + step - 1) // step):
        few = min(step, chunks - load * step)
        gates = load_weight(gate_up, lanes, True, load * step, few, start * height, tiles * height)
        ups = load_weight(gate_up, lanes, True, load * step, few, inner + start * height, tiles * height)
        for number in nl.affine_range(few):
            chunk = load * step + number
            for t in nl.affine_range(tiles):
                place = nl.ds(t % pack * tokens, tokens)
                columns = nl.ds(t * height, height)
                nisa.nc_matmul(
                    dst=gate[:, t // pack, place],
                    stationary=gates[:, number, columns],
                    moving=turned[:, chunk],
                    accumulate=chunk > 0,
                )
                nisa.nc_matmul(
                    dst=up[:, t // pack, place],
                    stationary=ups[:, number, columns],
                    moving=turned[:, chunk],
                    accumulate=chunk > 0,
                )
    for bank in nl.affine_range((tiles + pack - 1) // pack):
        few = min(pack, tiles - bank * pack)
        activated = nl.ndarray((height, few * tokens), nl.float32)
        nisa.activation(dst=activated, op=nl.silu, data=gate[:, bank, 0 : few * tokens])
        nisa.tensor_tensor(
            dst=middle[:, nl.ds(start + bank * pack, few)],
            data1=activated,
            data2=up[:, bank, 0 : few * tokens],
            op=nl.multiply,
        )
