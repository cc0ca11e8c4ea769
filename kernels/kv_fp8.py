"""NKI kernels of `kv_quantize` and `kv_dequantize`.

Roofline: HBM traffic, three bytes an element between bfloat16 and an 8-bit float; 17 us for 2048 x 8 x 128 at 362 GB/s.
Either engine takes about as long for an element as the transfers do: the Scalar Engine scales, and the Vector Engine
clamps and rounds.

Trainium 2 has the float8_e4m3 with infinities, whose largest value is 240; torch has float8_e4m3fn. They share the bits
of everything up to 240, so the values travel as bytes and are clamped to no more than that first.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
import torch

from vllm_neuron.kernels.tiling import DTYPES, PARTITIONS, require, require_array, require_cores, share

WIDTH = 1024
"""Elements per partition of a tile."""


def kv_quantize(x: Any, factor: Any, limit: Any, lnc: int = 1) -> Any:
    """x [T, K, D] times `factor` ([1], float32), clamped to +-`limit` ([1], float32), as float8_e4m3fn.

    Args:
        x: float32 or bfloat16.
        factor: of the layer's keys or values.
        limit: at most 240.
        lnc: cores, which share the heads of all tokens.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    require_cores(lnc)
    require_array("x", x, ("T", "K", "D"))
    require_array("factor", factor, (1,), ("float32",))
    require_array("limit", limit, (1,), ("float32",))
    rows = x.reshape(-1, x.shape[2])
    return kv_quantize_kernel[lnc](rows, factor, limit).view(torch.float8_e4m3fn).reshape(x.shape)


def kv_dequantize(values: Any, factor: Any, dtype: torch.dtype, lnc: int = 1) -> Any:
    """Values [T, K, D] of kv_quantize times `factor` ([1], float32), in `dtype`.

    Args:
        values: float8_e4m3fn of up to +-240.
        factor: of the layer's keys or values.
        dtype: float32 or bfloat16.
        lnc: cores, which share the heads of all tokens.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    require_cores(lnc)
    require_array("values", values, ("T", "K", "D"), ("float8_e4m3fn",))
    require_array("factor", factor, (1,), ("float32",))
    name = str(dtype).removeprefix("torch.")
    require(name in DTYPES, "dtype", f"must be {' or '.join(DTYPES)}", name)
    rows = values.reshape(-1, values.shape[2]).view(torch.uint8)
    return kv_dequantize_kernel[lnc](rows, factor, name).reshape(values.shape)


@nki.jit
def kv_quantize_kernel(x, factor, limit):
    """Bytes of the float8_e4m3 of x [R, D] times factor [1], clamped to +-limit [1]."""
    out = nl.ndarray(x.shape, nl.uint8, buffer=nl.shared_hbm)
    highest = _everywhere(limit)
    lowest = nl.ndarray((PARTITIONS, 1), nl.float32)
    nisa.activation(dst=lowest, op=nl.copy, data=highest, scale=-1.0)
    _over_rows(x, out, _everywhere(factor), (lowest, highest))
    return out


@nki.jit
def kv_dequantize_kernel(values, factor, dtype):
    """Bytes [R, D] of float8_e4m3 times factor [1]."""
    out = nl.ndarray(values.shape, dtype, buffer=nl.shared_hbm)
    _over_rows(values, out, _everywhere(factor), ())
    return out


def _everywhere(value):
    """One value in all partitions."""
    column = nl.ndarray((PARTITIONS, 1), nl.float32)
    nisa.dma_copy(dst=column, src=value.ap(pattern=[[0, PARTITIONS], [1, 1]]))
    return column


def _over_rows(source, out, factor, clamp):
    """All rows [R, D]: as many as possible in equal parts for 128 partitions, the rest with a row per partition.

    Rows are quantized if there are two columns to `clamp` them between, and dequantized if there are none.
    """
    dim = source.shape[1]
    first, count = share(source.shape[0])
    each = count // PARTITIONS * dim
    for number in nl.affine_range((each + WIDTH - 1) // WIDTH):
        start = number * WIDTH
        columns = min(WIDTH, each - start)
        pattern = [[each, PARTITIONS], [1, columns]]
        _tile(source, out, factor, clamp, pattern, first * dim + start)
    rest = count % PARTITIONS
    if rest > 0:
        row = first + count - rest
        for number in nl.affine_range((dim + WIDTH - 1) // WIDTH):
            start = number * WIDTH
            pattern = [[dim, rest], [1, min(WIDTH, dim - start)]]
            _tile(source, out, factor, clamp, pattern, row * dim + start)


def _tile(source, out, factor, clamp, pattern, offset):
    lanes, columns = pattern[0][1], pattern[1][1]
    tile = nl.ndarray((lanes, columns), source.dtype)
    nisa.dma_copy(dst=tile, src=source.ap(pattern=pattern, offset=offset))
    if len(clamp) > 0:
        lowest, highest = clamp
        scaled = nl.ndarray((lanes, columns), nl.float32)
        nisa.activation(dst=scaled, op=nl.copy, data=tile, scale=factor[0:lanes])
        result = nl.ndarray((lanes, columns), nl.float8_e4m3)
        low, high = lowest[0:lanes], highest[0:lanes]
        nisa.tensor_scalar(dst=result, data=scaled, op0=nl.minimum, operand0=high, op1=nl.maximum, operand1=low)
        nisa.dma_copy(dst=out.ap(pattern=pattern, offset=offset), src=result.view(nl.uint8))
        return
    result = nl.ndarray((lanes, columns), out.dtype)
    nisa.activation(dst=result, op=nl.copy, data=tile.view(nl.float8_e4m3), scale=factor[0:lanes])
    nisa.dma_copy(dst=out.ap(pattern=pattern, offset=offset), src=result)
