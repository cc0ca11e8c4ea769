"""The one place that decides, per op, between a kernel and its torch twin.

Each op has a twin in `<op>_torch.py` (its specification). A kernel set replaces some of them while a graph is traced:

    with using(KernelSet.CPU):
        traced = route.trace(...)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from importlib import import_module
from typing import Any


class KernelSet(Enum):
    """Where the implementation of an op comes from."""

    TORCH = "torch"
    """The torch twins: every route can lower them."""
    CPU = "cpu"
    """C++ kernels for the native route in CPU mode."""


TWINS: dict[str, str] = {
    "embedding": "embedding_torch",
    "linear": "linear_torch",
    "rms_norm": "rms_norm_torch",
    "add_rms_norm": "rms_norm_torch",
    "rope_tables": "rope_torch",
    "rope": "rope_torch",
    "silu_mul": "silu_mul_torch",
    "kv_write": "kv_write_torch",
    "paged_attention": "paged_attention_torch",
}
"""Every op to the module of this package that holds its twin, a function of the op's name."""

KERNELS: dict[KernelSet, str] = {KernelSet.CPU: "cpu.ops"}
"""Every other kernel set to its module; an op that the module does not define falls back to the twin."""

_active: ContextVar[KernelSet] = ContextVar("kernel_set", default=KernelSet.TORCH)


@contextmanager
def using(kernels: KernelSet) -> Iterator[None]:
    """Trace with this kernel set inside the block."""
    token = _active.set(kernels)
    try:
        yield
    finally:
        _active.reset(token)


def implementation(op: str) -> Callable[..., Any]:
    """The function that computes `op` under the active kernel set. Modules are imported when first asked for."""
    twin = getattr(import_module(f"{__package__}.{TWINS[op]}"), op)
    kernels = KERNELS.get(_active.get())
    return twin if kernels is None else getattr(import_module(f"{__package__}.{kernels}"), op, twin)
