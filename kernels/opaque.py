"""The NKI kernels as operators `torch.ops.vllm_neuron_nki.*`: one node each in a graph, which nothing looks into.

On Neuron devices torch-neuronx's `nki_op` makes the operators, which compile into the graph around them; nobody has
run that yet. On the CPU they are torch's own custom operators and run their kernel in the simulator, or in the nki
package of the Neuron SDK where that is installed. Each has the arguments of its kernel; what it returns is known from
their shapes alone, and arguments that the kernel does not take are refused while a graph is traced.
"""

import ast
import importlib
import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "vllm_neuron_nki"
"""Of the operators."""

_PACKAGE = "vllm_neuron.kernels"
_MODULES = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "rope": "rope",
    "kv_write": "kv_write",
    "kv_written": "kv_write",
    "paged_decode_attention": "paged_decode_attention",
    "paged_prefill_attention": "paged_prefill_attention",
    "decode_mask": "decode_mask",
    "top_k": "top_k",
    "argmax": "top_k",
}
"""Every operator to the module of its kernel."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, lnc: int) -> Tensor:
    """See `rms_norm`."""
    return _kernel("rms_norm")(x, weight, eps, lnc)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, lnc: int) -> tuple[Tensor, Tensor]:
    """See `rms_norm`."""
    return _kernel("add_rms_norm")(x, residual, weight, eps, lnc)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, lnc: int) -> tuple[Tensor, Tensor]:
    """See `rope`."""
    return _kernel("rope")(q, k, cos, sin, lnc)


def kv_write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, lnc: int) -> None:
    """See `kv_write`; the caches are written in place."""
    _kernel("kv_write")(k_cache, v_cache, k, v, slots, lnc)


def kv_written(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, lnc: int
) -> tuple[Tensor, Tensor]:
    """See `kv_write`; new caches are returned, for graphs that must not change an argument."""
    caches = k_cache.clone(), v_cache.clone()
    _kernel("kv_write")(*caches, k, v, slots, lnc)
    return caches


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    lnc: int,
) -> Tensor:
    """See `paged_decode_attention`."""
    kernel = _kernel("paged_decode_attention")
    return kernel(q, k_cache, v_cache, block_table, positions, scale, window, sinks, mask, lnc)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    lnc: int,
) -> Tensor:
    """See `paged_prefill_attention`."""
    kernel = _kernel("paged_prefill_attention")
    return kernel(q, k_cache, v_cache, block_table, positions, scale, window, sinks, lnc)


def decode_mask(positions: Tensor, context: int, window: int | None, lnc: int) -> Tensor:
    """See `decode_mask`."""
    return _kernel("decode_mask")(positions, context, window, lnc)


def top_k(x: Tensor, k: int, lnc: int) -> tuple[Tensor, Tensor]:
    """See `top_k`."""
    return _kernel("top_k")(x, k, lnc)


def argmax(x: Tensor, lnc: int) -> Tensor:
    """See `top_k`."""
    return _kernel("argmax")(x, lnc)


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _like_first_two(x: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), y.new_empty(y.shape)


_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    rms_norm: _like_first,
    add_rms_norm: _like_first_two,
    rope: _like_first_two,
    kv_write: lambda *_: None,
    kv_written: _like_first_two,
    paged_decode_attention: _like_first,
    paged_prefill_attention: _like_first,
    decode_mask: lambda positions, context, *_: positions.new_empty(positions.shape[0], context, dtype=torch.uint8),
    top_k: lambda x, k, _: (x.new_empty(x.shape[0], k), x.new_empty(x.shape[0], k, dtype=torch.int32)),
    argmax: lambda x, _: x.new_empty(x.shape[0], dtype=torch.int32),
}
"""Every operator to what its results look like."""

_registering = threading.Lock()


def register(on_device: bool) -> None:
    """Define the operators, once per process, whichever of its threads is the first.

    Args:
        on_device: they are for Neuron devices; else for the CPU.

    Raises:
        RuntimeError: torch-neuronx is too old to take kernels.
    """
    with _registering:
        _register(on_device)


@cache
def _register(on_device: bool) -> None:
    define: Callable[..., Any] = torch.library.custom_op
    if on_device:
        backend = importlib.import_module("torch_neuronx")
        if not hasattr(backend, "nki_op"):
            raise RuntimeError(
                "torch-neuronx has no nki_op, which puts NKI kernels into a graph: install a later one, or set "
                "VLLM_NEURON_DISABLE_NKI_KERNELS=1"
            )
        define = backend.nki_op
    else:
        from vllm_neuron.kernels import simulator

        simulator.install()
    for function, form in _FORMS.items():
        name = f"{NAMESPACE}::{function.__name__}"
        define(name, mutates_args=("k_cache", "v_cache") if function is kv_write else ())(function)
        torch.library.register_fake(name, form)


def check(name: str, *arguments: Any) -> None:
    """Whether the kernel of an operator takes these arguments; of tensors only shapes and dtypes count.

    Raises:
        ValueError: it does not, and why.
    """
    _function(name, f"check_{_function_name(name)}")(*arguments)


def sources(text: str) -> tuple[str, ...]:
    """Modules that decide what the operators do that a graph's text names, those that they import included."""
    names = set(re.findall(rf"{NAMESPACE}\.(\w+)", text))
    found = {module for name in names for module in _imported(f"{_PACKAGE}.{_MODULES[name]}")}
    return tuple(sorted(found | {__name__})) if names else ()


def _function_name(name: str) -> str:
    return "kv_write" if name == "kv_written" else name


def _kernel(name: str) -> Callable[..., Any]:
    return _function(name, name)


def _function(name: str, function: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"{_PACKAGE}.{_MODULES[name]}"), function)


def _imported(module: str) -> Iterator[str]:
    """A module of this package and what it imports from it, directly or not."""
    yield module
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{_PACKAGE}."):
            yield from _imported(node.module)
