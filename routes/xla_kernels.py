"""Kernels in the XLA programs of CPU mode: each is one custom call, for which XLA calls back into this process.

A call has the name of its kernels' namespace and a text that describes it, so a program and what is saved of it are the
same in every process:

    vllm_neuron_nki.rope bfloat16[8,9,64] bfloat16[8,3,64] bfloat16[8,32] bfloat16[8,32] 1 -> bfloat16[8,9,64] ...

XLA hands over where its buffers are, which become tensors for the operator: of NKI kernels below, of C++ kernels in
`kernels/cpu/custom_call.h`, without Python. How neuronx-cc wants to be handed a kernel is not documented, so there is
none for devices.
"""

import ctypes
import math
import re
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from vllm_neuron.kernels import cpu, opaque
from vllm_neuron.routes import cpu_kernels

NAMESPACES = (cpu.NAMESPACE, opaque.NAMESPACE)
"""Of the operators that are kernels, and XLA's names of the functions that are called back."""

_STATUS_RETURNING_UNIFIED = 3
"""The form of a custom call whose function is (results, operands, description, its length, status)."""

_Pointers = ctypes.POINTER(ctypes.c_void_p)
_Function = ctypes.CFUNCTYPE(None, _Pointers, _Pointers, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_failures: list[BaseException] = []
_lock = threading.Lock()


def is_kernel(target: Any) -> bool:
    """Whether an operator of a graph is a kernel."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES


def emit(target: torch._ops.OpOverload, values: Sequence[Any], arguments: Sequence[Any], results: Any) -> Any:
    """Add a call to the program that torch_xla builds.

    Args:
        target: the operator.
        values: its arguments, tensors among them those of torch_xla, with the bits that the operator is to see.
        arguments: the same arguments with tensors that have the dtypes which the operator is to see.
        results: what it returns, in form: a tensor, or a tuple of them.

    Returns:
        torch_xla's tensors for the results.
    """
    import torch_xla

    single = isinstance(results, torch.Tensor)
    forms = (results,) if single else results
    operator = target._schema.name.replace("::", ".")
    made = torch_xla._XLAC._xla_custom_call(
        [value for value in values if isinstance(value, torch.Tensor)],
        target.namespace,
        [list(form.shape) for form in forms],
        [form.dtype for form in forms],
        False,
        " ".join([operator, *map(_word, arguments), "->", *map(_word, forms)]),
        _STATUS_RETURNING_UNIFIED,
        {},
    )
    return made[0] if single else tuple(made)


def fix_layouts(call: Any) -> None:
    """Say of a custom call in a StableHLO module that all its buffers are row-major: XLA might choose otherwise."""
    from jaxlib.mlir import ir

    def row_major(types: Any) -> ir.ArrayAttr:
        return ir.ArrayAttr.get([ir.Attribute.parse(_row_major(ir.RankedTensorType(t).rank)) for t in types])

    (result,) = (value.type for value in call.results)
    is_tuple = isinstance(result, ir.TupleType)
    results = [result.get_type(i) for i in range(result.num_types)] if is_tuple else [result]
    call.attributes["operand_layouts"] = row_major([operand.type for operand in call.operands])
    call.attributes["result_layouts"] = row_major(results)


def register(text: str) -> None:
    """Tell the PJRT client for the CPU what to call, once per process, whichever of its threads is the first.

    Args:
        text: names the namespaces of the kernels that a program calls.

    Raises:
        KernelBuildError: it calls C++ kernels, and they cannot be built.
    """
    with _lock:
        for namespace in NAMESPACES:
            if namespace in text:
                _register(namespace)


@cache
def _register(namespace: str) -> None:
    from jaxlib import xla_client

    function = _called_back if namespace == opaque.NAMESPACE else cpu_kernels.custom_call()
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new_capsule(ctypes.cast(function, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
    xla_client.register_custom_call_target(namespace, capsule, platform="cpu", api_version=0)


def raise_failure(text: str) -> None:
    """Raise what went wrong in a kernel since the last time: an exception cannot pass through XLA.

    Args:
        text: names the namespaces of the kernels that may have been called.
    """
    with _lock:
        failures, _failures[:] = list(_failures), []
    if failures:
        raise failures[0]
    if cpu_kernels.named_in(text):
        cpu_kernels.raise_failure()


class _Form(NamedTuple):
    """Of a tensor in a custom call."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class _Call(NamedTuple):
    """What a text describes. Arguments are forms of tensors, or values."""

    operator: Any
    arguments: tuple[Any, ...]
    results: tuple[_Form, ...]


@_Function
def _called_back(results: Any, operands: Any, text: int, length: int, status: int | None) -> None:
    try:
        call = _parse(ctypes.string_at(text, length).decode())
        pointers = iter(range(len(call.arguments)))
        arguments = [_tensor(operands[next(pointers)], a) if isinstance(a, _Form) else a for a in call.arguments]
        with torch.no_grad():
            values = call.operator(*arguments)
        values = (values,) if len(call.results) == 1 else values
        for target, value in zip(_results(results, call.results), values, strict=True):
            target.copy_(value)
    except BaseException as failure:
        with _lock:
            _failures.append(failure)


@cache
def _parse(text: str) -> _Call:
    opaque.register(on_device=False)
    operator, *words = text.split(" ")
    arrow = words.index("->")
    overloads = getattr(getattr(torch.ops, opaque.NAMESPACE), operator.removeprefix(f"{opaque.NAMESPACE}."))
    arguments, results = ([_value(word) for word in part] for part in (words[:arrow], words[arrow + 1 :]))
    return _Call(overloads.default, tuple(arguments), tuple(results))


def _value(word: str) -> Any:
    """What `_word` wrote: the form of a tensor, or the value."""
    if tensor := re.fullmatch(r"(\w+)\[([\d,]*)\]", word):
        return _Form(getattr(torch, tensor[1]), tuple(int(size) for size in tensor[2].split(",") if size))
    try:
        return None if word == "None" else int(word)
    except ValueError:
        return float(word)


def _word(value: Any) -> str:
    """A tensor's dtype and shape, or another value, as a word in the description of a call."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    return repr(value)


def _results(pointers: Any, forms: Sequence[_Form]) -> Iterator[torch.Tensor]:
    """Where the results go: a single one to the address itself, several to the addresses that lie there."""
    single = ctypes.cast(pointers, ctypes.c_void_p).value
    for index, form in enumerate(forms):
        yield _tensor(single if len(forms) == 1 else pointers[index], form)


def _tensor(pointer: Any, form: _Form) -> torch.Tensor:
    """The tensor of a form at an address, whose memory is XLA's."""
    buffer = (ctypes.c_char * (math.prod(form.shape) * form.dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(buffer, dtype=form.dtype).view(form.shape)


def _row_major(rank: int) -> str:
    return f"dense<[{', '.join(str(axis) for axis in reversed(range(rank)))}]> : tensor<{rank}xindex>"
