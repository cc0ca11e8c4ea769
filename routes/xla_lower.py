"""Lowering of a captured graph to StableHLO with torch_xla, on placeholders that hold no memory.

XLA's CPU compiler and Neuron's are given the same graph in different words; see `xla_cpu`.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from vllm_neuron.routes import xla_kernels
from vllm_neuron.routes.capture import Captured
from vllm_neuron.routes.xla_cpu import CpuInterpreter
from vllm_neuron.routes.xla_interpreter import XlaInterpreter

_lock = threading.Lock()


@dataclass(frozen=True)
class StableHLO:
    """A lowered graph.

    Attributes:
        text: the module. It takes the arguments of `parameters`, donates the KV cache and returns what the captured
            graph returns; for the CPU its KV caches are integers.
        parameters: for each parameter of the module, the flat argument of the captured graph it is.
        hlo: the same module as torch_xla wrote it, a serialized HloModuleProto, with the same parameters donated.
    """

    text: str
    parameters: tuple[int, ...]
    hlo: bytes = field(repr=False)


def lower(name: str, captured: Captured, platform: str) -> StableHLO:
    """StableHLO of a captured graph.

    Args:
        name: of the graph.
        captured: the graph.
        platform: whose compiler it is for: "cpu", "trn2" or "trn3".

    Raises:
        ValueError: torch_xla has no lowering of an operator, or would bake a value into the graph.
    """
    with _lock:
        hlo, parameters = _hlo(name, captured, CpuInterpreter if platform == "cpu" else XlaInterpreter)
    kv, num_outputs = captured.signature.kv_range, captured.signature.outputs.num_leaves
    donated = {
        parameter: num_outputs + argument - kv.start for parameter, argument in enumerate(parameters) if argument in kv
    }
    return StableHLO(_stablehlo(name, hlo, len(parameters), donated), parameters, hlo + _aliases(donated))


def _hlo(name: str, captured: Captured, interpreter: type[XlaInterpreter]) -> tuple[bytes, tuple[int, ...]]:
    """Serialized HLO, and which flat argument each of its parameters is."""
    torch_xla = import_torch_xla()
    from torch_xla.core import xla_builder

    lowering = torch_xla._XLAC.lowering
    check_operators(name, captured.module)
    kv = captured.signature.kv_range
    arguments = [
        xla_builder.create_placeholder_tensor(
            leaf.shape, interpreter.kv_dtype(leaf.dtype) if index in kv else leaf.dtype
        )
        for index, leaf in enumerate(captured.signature.arguments)
    ]
    # Otherwise torch_xla makes most Python numbers parameters of the graph, to compile less often when they change.
    torch_xla._XLAC._set_xla_all_numbers_special_scalars(True)
    results = interpreter(captured).run(*arguments)
    context = lowering.LoweringContext(name)
    context.build(results)
    argument_of = {context.tensor_parameter_id(argument): index for index, argument in enumerate(arguments)}
    argument_of.pop(-1, None)
    if sorted(argument_of) != list(range(len(argument_of))):
        raise ValueError(f"{name}: torch_xla numbers the parameters {sorted(argument_of)}: a value was baked in")
    return context.hlo(), tuple(argument_of[parameter] for parameter in range(len(argument_of)))


def _stablehlo(name: str, hlo: bytes, num_parameters: int, donated: Mapping[int, int]) -> str:
    """Text of serialized HLO, with parameters donated to results."""
    from jax._src.interpreters.mlir import make_ir_context
    from jaxlib import _jax
    from jaxlib.mlir import ir

    with make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(hlo))
        main: Any = next(f for f in module.body.operations if f.attributes["sym_name"] == ir.StringAttr.get("main"))
        attributes = []
        for parameter in range(num_parameters):
            entry: dict[str, ir.Attribute] = {}
            if parameter in donated:
                index = ir.IntegerType.get_signless(32)
                entry["tf.aliasing_output"] = ir.IntegerAttr.get(index, donated[parameter])
            attributes.append(ir.DictAttr.get(entry))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
        for operation in main.entry_block.operations:
            if operation.name == "stablehlo.custom_call" and operation.call_target_name.value in xla_kernels.NAMESPACES:
                xla_kernels.fix_layouts(operation)
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        return str(module)


def _aliases(donated: Mapping[int, int]) -> bytes:
    """Field `input_output_alias` of an HloModuleProto, to be appended to a serialized one.

    It is written by hand, because torch_xla aliases only what it runs itself. From XLA's hlo.proto:

        HloModuleProto             input_output_alias = 8
        HloInputOutputAliasProto   repeated entries = 1
        AliasEntryProto            repeated int64 output_shape_index = 1, int64 parameter_number = 2, kind = 4
    """
    may_alias = b"\x20\x01"
    entries = [
        _field(1, _field(1, _varint(result)) + b"\x10" + _varint(parameter) + may_alias)
        for parameter, result in donated.items()
    ]
    return _field(8, b"".join(entries))


def _field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer that has a length."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """A whole number in groups of seven bits, the lowest first; all but the last are marked."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def import_torch_xla() -> Any:
    """The torch_xla module, brought up on the CPU: lowering never needs a device.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    flags = os.environ.get("XLA_FLAGS")
    try:
        import torch_xla
    except ImportError as error:
        raise ImportError(
            "the XLA route (VLLM_NEURON_BACKEND=vllm_neuron) needs torch_xla: pip install torch-xla==2.9.0, "
            "or unset VLLM_NEURON_BACKEND to use the native route"
        ) from error
    finally:
        # torch_xla adds its own, and the PJRT client would compile with them or not, as the import order has it.
        os.environ.pop("XLA_FLAGS", None)
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags
    # An operator that torch_xla runs eagerly raises instead.
    torch_xla._XLAC._set_allow_execution(False)
    return torch_xla


def check_operators(name: str, graph: GraphModule) -> None:
    """Raise ValueError if torch_xla would run an operator of the graph eagerly on the CPU."""
    missing = sorted({str(n.target) for n in graph.graph.nodes if n.op == "call_function" and not _lowers(n.target)})
    if missing:
        raise ValueError(f"{name}: torch_xla has no lowering of {', '.join(missing)}")


def _lowers(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or xla_kernels.is_kernel(target):
        return True
    kinds = ("XLA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    operator = target.name()
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator, kind) for kind in kinds)
