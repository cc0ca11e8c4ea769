# mypy: disallow-untyped-defs=False
"""NKI kernel of `decode_mask`.

Roofline: HBM traffic, the T * S bytes of the mask; 0.36 us for 16 rows of 8192 at 362 GB/s of a trn2 core. Below that
size the estimate is what the chain of instructions takes: token numbers, positions in, one comparison per COLUMNS
tokens, mask out; 5.6 us for 2048 tokens, 12 us for 8192. Token numbers are made once for all rows.

Never run on hardware. Times are estimates from documented formulas.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.tiling import EXACT, require, require_array, require_cores, require_window
from vllm_neuron.kernels.tiling import PARTITIONS as P

COLUMNS = 2048
"""Tokens of one comparison."""


def decode_mask(positions: Any, context: int, window: int | None = None, lnc: int = 1) -> Any:
    """Which tokens of a context each row sees, as the twin has it.

    Args:
        positions: [T] int32.
        context: S, tokens of the longest request, padding included.
        window: positions a row looks back on, its own included; None is all of them.
        lnc: cores, which share the tokens.

    Returns:
        uint8 [T, S], 1 where a row sees the token.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    check_decode_mask(positions, context, window, lnc)
    return decode_mask_kernel[lnc](positions, context, window)


def check_decode_mask(positions: Any, context: int, window: int | None = None, lnc: int = 1) -> None:
    """Raises ValueError if decode_mask does not take these arguments."""
    require_cores(lnc)
    require_array("positions", positions, ("T",), ("int32",))
    require(1 <= context <= EXACT, "context", f"must be 1 to {EXACT}", context)
    require_window(window)


@nki.jit
def decode_mask_kernel(positions, context, window=None):
    """decode_mask of this core's tokens."""
    rows = positions.shape[0]
    out = nl.ndarray((rows, context), nl.uint8, buffer=nl.shared_hbm)
    each = (context + nl.num_programs(axes=0) - 1) // nl.num_programs(axes=0)
    first = nl.program_id(0) * each
    stop = min(first + each, context)
    for start in nl.static_range(first, stop, COLUMNS):
        count = min(COLUMNS, stop - start)
        token = nl.ndarray((min(P, rows), count), nl.float32)
        nisa.iota(dst=token, pattern=[[1, count]], offset=start)
        for row in nl.affine_range(0, rows, P):
            several = min(P, rows - row)
            raw, last = nl.ndarray((several, 1), nl.int32), nl.ndarray((several, 1), nl.float32)
            nisa.dma_copy(dst=raw, src=positions[nl.ds(row, several)])
            nisa.tensor_copy(dst=last, src=raw)
            mask = nl.ndarray((several, count), nl.uint8)
            nisa.tensor_scalar(dst=mask, data=token[:several], op0=nl.less_equal, operand0=last)
            if window != None:  # noqa: E711
                before = nl.ndarray((several, 1), nl.float32)
                nisa.tensor_scalar(dst=before, data=last, op0=nl.add, operand0=-float(window))
                nisa.scalar_tensor_tensor(
                    dst=mask, data=token[:several], op0=nl.greater, operand0=before, op1=nl.multiply, operand1=mask
                )
            nisa.dma_copy(dst=out[nl.ds(row, several), nl.ds(start, count)], src=mask)
    return out
