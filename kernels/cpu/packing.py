"""Packed copies of weights, which decode steps of a few requests read instead: a quarter less memory to wait for.

They are exact (`packed.h`), and results do not change by a bit.
"""

import logging
import mmap
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from vllm_neuron.kernels.cpu import build

logger = logging.getLogger(__name__)


def pack(weights: Sequence[torch.Tensor], room: int) -> object:
    """Pack the matrices of bfloat16 among these weights, all in one piece of memory, unless they need more than `room`.

    A copy stands for the memory of its weight, to which nobody may write any more, whoever passes it to an operator.

    Args:
        weights: in the order in which a step reads them.
        room: bytes that all copies may take.

    Returns:
        what owns the copies: they are used as long as it lives.
    """
    build.load()
    copies = torch.classes.vllm_neuron_cpu.Copies()
    matrices = [weight for weight in weights if weight.dtype is torch.bfloat16 and weight.dim() == 2]
    needed = sum(_most_bytes(matrix) for matrix in matrices)
    if not matrices:
        return copies
    if needed > room:
        logger.info("Weights are not packed: that would need %.2f GiB, and may take %.2f", needed / 2**30, room / 2**30)
        return copies
    start = time.monotonic()
    piece = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # The kernel may be built without large pages.
        piece.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(piece, dtype=torch.uint8)
    taken = 0
    for matrix in matrices:
        taken += copies.add(matrix, memory[taken:])
    logger.info("Packed weights into %.2f GiB in %.1f s", taken / 2**30, time.monotonic() - start)
    return copies


def _most_bytes(matrix: torch.Tensor) -> int:
    """What the copy of a matrix [rows, columns] takes, at most: its columns are filled up to 64."""
    rows, columns = matrix.shape
    return rows * (columns + -columns % 64) * 3 // 2
