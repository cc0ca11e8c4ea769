"""The one place that decides, per op, between a kernel and its torch twin.

Each op has a twin in `<op>_torch.py` (its specification). A kernel set replaces some of them while a graph is traced:

    with using(KernelSet.CPU):
        traced = route.trace(...)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any


class KernelSet(Enum):
    """Where the implementation of an op comes from."""

    TORCH = "torch"
    """The torch twins: every route can lower them."""
    CPU = "cpu"
    """C++ kernels for the native route in CPU mode."""


_active: ContextVar[KernelSet] = ContextVar("kernel_set", default=KernelSet.TORCH)


@contextmanager
def using(kernels: KernelSet) -> Iterator[None]:
    """Trace with this kernel set inside the block."""
    token = _active.set(kernels)
    try:
        yield
    finally:
        _active.reset(token)
