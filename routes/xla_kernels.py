"""NKI kernels in the XLA programs of CPU mode: each is one custom call, in which XLA calls back into this process.

The call has a name of ours and a description of itself in JSON (operator, arguments, forms), so a program's text and
what is saved of it are the same in every process. XLA hands over where its buffers are, which become tensors for the
operator; see `CALL_TARGET`. How neuronx-cc wants to be handed a kernel is not documented, so there is none for devices.
"""

import ctypes
import json
import math
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from vllm_neuron.kernels import opaque

CALL_TARGET = "vllm_neuron_nki"
"""XLA's name of the function that is called back."""

_STATUS_RETURNING_UNIFIED = 3
"""The form of a custom call whose function is (results, operands, description, its length, status)."""

_Pointers = ctypes.POINTER(ctypes.c_void_p)
_Function = ctypes.CFUNCTYPE(None, _Pointers, _Pointers, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_failures: list[BaseException] = []
_lock = threading.Lock()


def is_kernel(target: Any) -> bool:
    """Whether an operator of a graph is an NKI kernel."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == opaque.NAMESPACE


def emit(target: torch._ops.OpOverload, arguments: Sequence[Any], results: Any) -> Any:
    """Add a call to the program that torch_xla builds.

    Args:
        target: the operator.
        arguments: its arguments, tensors among them those of torch_xla.
        results: what it returns, in form: a tensor, or a tuple of them.

    Returns:
        torch_xla's tensors for the results.
    """
    import torch_xla

    single = isinstance(results, torch.Tensor)
    forms = [_form(result) for result in ((results,) if single else results)]
    description = {
        "op": f"{opaque.NAMESPACE}.{target._schema.name.split('::')[1]}",
        "arguments": [_form(a) if isinstance(a, torch.Tensor) else a for a in arguments],
        "results": forms,
    }
    values = torch_xla._XLAC._xla_custom_call(
        [a for a in arguments if isinstance(a, torch.Tensor)],
        CALL_TARGET,
        [form["shape"] for form in forms],
        [getattr(torch, form["dtype"]) for form in forms],
        False,
        json.dumps(description, sort_keys=True),
        _STATUS_RETURNING_UNIFIED,
        {},
    )
    return values[0] if single else tuple(values)


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


def register() -> None:
    """Tell the PJRT client for the CPU what to call, once per process, whichever of its threads is the first."""
    with _lock:
        _register()


@cache
def _register() -> None:
    from jaxlib import xla_client

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    function = ctypes.cast(_called_back, ctypes.c_void_p)
    capsule = new_capsule(function, b"xla._CUSTOM_CALL_TARGET", None)
    xla_client.register_custom_call_target(CALL_TARGET, capsule, platform="cpu", api_version=0)


def raise_failure() -> None:
    """Raise what went wrong in a kernel since the last time: an exception cannot pass through XLA."""
    with _lock:
        failures, _failures[:] = list(_failures), []
    if failures:
        raise failures[0]


@_Function
def _called_back(results: Any, operands: Any, text: int, length: int, status: int | None) -> None:
    try:
        opaque.register(on_device=False)
        description = json.loads(ctypes.string_at(text, length))
        pointers = iter(range(len(description["arguments"])))
        arguments = [
            _tensor(operands[next(pointers)], a) if isinstance(a, dict) else a for a in description["arguments"]
        ]
        forms = description["results"]
        name = description["op"].removeprefix(f"{opaque.NAMESPACE}.")
        with torch.no_grad():
            values = getattr(getattr(torch.ops, opaque.NAMESPACE), name)(*arguments)
        for target, value in zip(_results(results, forms), (values,) if len(forms) == 1 else values, strict=True):
            target.copy_(value)
    except BaseException as failure:
        with _lock:
            _failures.append(failure)


def _results(pointers: Any, forms: Sequence[dict[str, Any]]) -> Iterator[torch.Tensor]:
    """Where the results go: a single one to the address itself, several to the addresses that lie there."""
    single = ctypes.cast(pointers, ctypes.c_void_p).value
    for index, form in enumerate(forms):
        yield _tensor(single if len(forms) == 1 else pointers[index], form)


def _tensor(pointer: Any, form: dict[str, Any]) -> torch.Tensor:
    """The tensor of a form at an address, whose memory is XLA's."""
    dtype = getattr(torch, form["dtype"])
    buffer = (ctypes.c_char * (math.prod(form["shape"]) * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(buffer, dtype=dtype).view(form["shape"])


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _row_major(rank: int) -> str:
    return f"dense<[{', '.join(str(axis) for axis in reversed(range(rank)))}]> : tensor<{rank}xindex>"
