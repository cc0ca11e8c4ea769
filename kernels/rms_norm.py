"""NKI kernel of `rms_norm` and `add_rms_norm`.

Roofline: HBM traffic, two (with a residual four) times T x H elements; 93 us for 2048 x 4096 in bfloat16 at 362 GB/s.

- Many rows: 128 of them at a time, a row per partition. The Scalar Engine squares and sums them in one pass (H
  cycles), the Vector Engine scales in one more (H cycles in bfloat16, 2 H in float32); both are below the DMA's time.
- Few rows: the hidden dimension is spread over the partitions, or one row would keep 1 of 128 lanes busy. A product
  with a matrix of 1 / H sums over partitions, and leaves the mean on every one of them.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.tiling import PARTITIONS, divisor, dtype_of, require, require_array, require_cores, share

FEW_ROWS = 32
"""Up to so many rows the hidden dimension is spread over partitions."""
ROW_BYTES = 32768
"""Of a row at most: up to five of them are in a partition of SBUF at the same time."""


def rms_norm(x: Any, weight: Any, eps: float, lnc: int = 1) -> Any:
    """x [..., H] over its root mean square, times `weight` [H] of the same type; computed in float32.

    Args:
        x: float32 or bfloat16.
        weight: of x's type.
        eps: added to the mean of the squares.
        lnc: cores, which share the rows.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    check_rms_norm(x, weight, eps, lnc)
    return rms_norm_kernel[lnc](x.reshape(-1, x.shape[-1]), weight, float(eps)).reshape(x.shape)


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, lnc: int = 1) -> tuple[Any, Any]:
    """(rms_norm(x + residual), x + residual), both [T, H]; the sum is rounded to x's type before it is normed.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    check_add_rms_norm(x, residual, weight, eps, lnc)
    normed, total = add_rms_norm_kernel[lnc](x, residual, weight, float(eps))
    return normed, total


def check_rms_norm(x: Any, weight: Any, eps: float, lnc: int = 1) -> None:
    """Raises ValueError if rms_norm does not take these arguments."""
    require_cores(lnc)
    require(x.ndim >= 1 and 0 not in x.shape, "x", "must have rows [..., H]", tuple(x.shape))
    require_array("x", x, tuple(x.shape))
    size = x.shape[-1] * (4 if dtype_of(x) == "float32" else 2)
    require(size <= ROW_BYTES, "x", f"must have rows of up to {ROW_BYTES} bytes", f"{size} bytes")
    require_array("weight", weight, (x.shape[-1],), (dtype_of(x),))


def check_add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, lnc: int = 1) -> None:
    """Raises ValueError if add_rms_norm does not take these arguments."""
    check_rms_norm(x, weight, eps, lnc)
    require_array("x", x, ("T", "H"))
    require_array("residual", residual, tuple(x.shape), (dtype_of(x),))


@nki.jit
def rms_norm_kernel(x, weight, eps):
    """rms_norm of x [T, H]."""
    normed = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    _norm(x, None, weight, eps, normed, None)
    return normed


@nki.jit
def add_rms_norm_kernel(x, residual, weight, eps):
    """add_rms_norm of x and residual [T, H]."""
    normed = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    total = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    _norm(x, residual, weight, eps, normed, total)
    return normed, total


def _norm(x, residual, weight, eps, normed, total):
    hidden = x.shape[1]
    first, count = share(x.shape[0])
    if count == 0:
        return
    lanes = divisor(hidden, PARTITIONS)
    if count <= FEW_ROWS and lanes >= FEW_ROWS:
        _spread(x, residual, weight, eps, normed, total, first, count, lanes)
        return
    height = min(count, PARTITIONS)
    gamma = nl.ndarray((height, hidden), weight.dtype)
    nisa.dma_copy(dst=gamma, src=weight.ap(pattern=[[0, height], [1, hidden]]))
    for start in nl.affine_range((count + height - 1) // height):
        row = first + start * height
        _rows(x, residual, gamma, eps, normed, total, row, min(height, first + count - row))


def _rows(x, residual, gamma, eps, normed, total, row, rows):
    """One tile with a row per partition."""
    hidden = x.shape[1]
    tile = nl.ndarray((rows, hidden), x.dtype)
    nisa.dma_copy(dst=tile, src=x[nl.ds(row, rows)])
    if residual != None:  # noqa: E711
        other = nl.ndarray((rows, hidden), x.dtype)
        nisa.dma_copy(dst=other, src=residual[nl.ds(row, rows)])
        nisa.tensor_tensor(dst=tile, data1=tile, data2=other, op=nl.add)
        nisa.dma_copy(dst=total[nl.ds(row, rows)], src=tile)
    out = nl.ndarray((rows, hidden), x.dtype)  # holds the squares first, which nobody reads
    sums = nl.ndarray((rows, 1), nl.float32)
    nisa.activation(
        dst=out, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=sums, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )
    scale = nl.ndarray((rows, 1), nl.float32)
    nisa.activation(dst=scale, op=nl.rsqrt, data=sums, scale=1.0 / hidden, bias=eps)
    nisa.scalar_tensor_tensor(
        dst=out, data=tile, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=gamma[0:rows]
    )
    nisa.dma_copy(dst=normed[nl.ds(row, rows)], src=out)


def _spread(x, residual, weight, eps, normed, total, first, count, lanes):
    """All rows at once, each over `lanes` partitions."""
    hidden = x.shape[1]
    width = hidden // lanes
    pattern = [[width, lanes], [hidden, count], [1, width]]
    offset = first * hidden
    tile = nl.ndarray((lanes, count, width), x.dtype)
    nisa.dma_copy(dst=tile, src=x.ap(pattern=pattern, offset=offset))
    if residual != None:  # noqa: E711
        other = nl.ndarray((lanes, count, width), x.dtype)
        nisa.dma_copy(dst=other, src=residual.ap(pattern=pattern, offset=offset))
        nisa.tensor_tensor(dst=tile, data1=tile, data2=other, op=nl.add)
        nisa.dma_copy(dst=total.ap(pattern=pattern, offset=offset), src=tile)
    gamma = nl.ndarray((lanes, width), weight.dtype)
    nisa.dma_copy(dst=gamma, src=weight.ap(pattern=[[width, lanes], [1, width]]))
    average = nl.ndarray((lanes, lanes), nl.float32)
    nisa.memset(dst=average, value=1.0 / hidden)

    squares = nl.ndarray((lanes, count, width), nl.float32)
    nisa.tensor_tensor(dst=squares, data1=tile, data2=tile, op=nl.multiply)
    sums = nl.ndarray((lanes, count), nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=squares, axis=2)
    means = nl.ndarray((lanes, count), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=means, stationary=average, moving=sums, accumulate=False)
    scale = nl.ndarray((lanes, count), nl.float32)
    nisa.activation(dst=scale, op=nl.rsqrt, data=means, bias=eps)

    weighted = nl.ndarray((lanes, count, width), nl.float32)
    nisa.tensor_tensor(
        dst=weighted, data1=tile, data2=gamma.ap(pattern=[[width, lanes], [0, count], [1, width]]), op=nl.multiply
    )
    out = nl.ndarray((lanes, count, width), x.dtype)
    nisa.tensor_tensor(
        dst=out, data1=weighted, data2=scale.ap(pattern=[[count, lanes], [1, count], [0, width]]), op=nl.multiply
    )
    nisa.dma_copy(dst=normed.ap(pattern=pattern, offset=offset), src=out)
