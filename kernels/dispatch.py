"""The one place that decides, per op, between a kernel and its torch twin.

Each op has a twin in `<op>_torch.py` (its specification). A kernel set replaces some of them while a graph is traced:

    with using(KernelSet.CPU):
        traced = route.trace(...)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from importlib import import_module
from typing import Any

from vllm_neuron.kernels.argmax_torch import argmax
from vllm_neuron.kernels.embedding_torch import embedding
from vllm_neuron.kernels.kv_write_torch import kv_write
from vllm_neuron.kernels.linear_torch import linear
from vllm_neuron.kernels.log_sum_exp_torch import log_sum_exp
from vllm_neuron.kernels.mask_logits_torch import mask_logits
from vllm_neuron.kernels.paged_attention_torch import paged_attention
from vllm_neuron.kernels.rms_norm_torch import add_rms_norm, rms_norm
from vllm_neuron.kernels.rope_torch import rope, rope_tables
from vllm_neuron.kernels.silu_mul_torch import silu_mul
from vllm_neuron.kernels.top_k_torch import top_k

Implementations = Mapping[str, Callable[..., Any]]


class KernelSet(Enum):
    """Where the implementation of an op comes from."""

    TORCH = "torch"
    """The torch twins: every route can lower them."""
    CPU = "cpu"
    """C++ kernels for the native route in CPU mode."""


_TWINS: Implementations = {
    op.__name__: op
    for op in (
        embedding,
        linear,
        rms_norm,
        add_rms_norm,
        rope_tables,
        rope,
        silu_mul,
        kv_write,
        paged_attention,
        mask_logits,
        top_k,
        argmax,
        log_sum_exp,
    )
}
_MODULES: Mapping[KernelSet, str] = {KernelSet.CPU: "vllm_neuron.kernels.cpu.ops"}
"""Every other kernel set to the module whose functions of the ops' names replace the twins."""

OPS: tuple[str, ...] = tuple(_TWINS)
"""Names of all ops."""

_active: ContextVar[Implementations] = ContextVar("implementations", default=_TWINS)


@contextmanager
def using(kernels: KernelSet) -> Iterator[None]:
    """Trace with this kernel set inside the block. Its module is imported, and built, only now."""
    token = _active.set(_implementations(kernels))
    try:
        yield
    finally:
        _active.reset(token)


def implementation(op: str) -> Callable[..., Any]:
    """The function that computes `op` under the active kernel set."""
    return _active.get()[op]


def _implementations(kernels: KernelSet) -> Implementations:
    if kernels not in _MODULES:
        return _TWINS
    module = import_module(_MODULES[kernels])
    return {op: getattr(module, op, twin) for op, twin in _TWINS.items()}
