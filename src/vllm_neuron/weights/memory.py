"""Memory for the weights of a table: one piece, in the order in which a step reads them, in large pages.

A decode step reads every weight once, which takes most of its time in CPU mode. Pages of 4 KiB cost a lookup each that
the CPU stops fetching ahead at, and separate pieces end its streams; see docs/performance.md.
"""

import math
import mmap
from contextlib import suppress

import torch

from vllm_neuron.weights.table import WeightTable

_ALIGNMENT = 64
"""Bytes: a cache line, and what XLA asks for to share memory with a tensor."""


def allocate(table: WeightTable, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A tensor of zeros for each weight of `table`, in its order; pages are taken when they are first written to.

    The piece of memory lives as long as one of the tensors.

    Args:
        table: names and forms.
        dtype: of the weights whose spec names none.
    """
    places, end = {}, 0
    for name, spec in table.items():
        places[name] = end
        end += -(-spec.num_bytes(dtype) // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # The kernel may be built without large pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensors = {}
    for name, place in places.items():
        shape, kind = table[name].shape, table[name].dtype or dtype
        flat = torch.frombuffer(memory, dtype=kind, count=math.prod(shape), offset=place)
        tensors[name] = flat.view(shape)
    return tensors
