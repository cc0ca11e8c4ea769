"""Lowering of a captured graph to StableHLO with torch_xla, on placeholders that hold no memory.

KV caches are integers of the same width in the lowered graph, and become numbers only after the gather: XLA's CPU
compiler widens a half-precision cache around its scatter, and so copies all of it at every step.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.utils import _pytree as pytree

from vllm_neuron.routes.capture import Captured

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype that stores the bit pattern of a number of so many bytes."""

_aten = torch.ops.aten
_lock = threading.Lock()

_MOVES: dict[Any, tuple[int, ...]] = {
    _aten.alias.default: (0,),
    _aten.clone.default: (0,),
    _aten.detach.default: (0,),
    _aten.view.default: (0,),
    _aten._unsafe_view.default: (0,),
    _aten.reshape.default: (0,),
    _aten.permute.default: (0,),
    _aten.transpose.int: (0,),
    _aten.t.default: (0,),
    _aten.unsqueeze.default: (0,),
    _aten.squeeze.dim: (0,),
    _aten.expand.default: (0,),
    _aten.select.int: (0,),
    _aten.slice.Tensor: (0,),
    _aten.index.Tensor: (0,),
    _aten.index_select.default: (0,),
    _aten.gather.default: (0,),
    _aten.index_copy.default: (0, 3),
    _aten.index_put.default: (0, 2),
    _aten.slice_scatter.default: (0, 1),
    _aten.select_scatter.default: (0, 1),
    _aten.scatter.src: (0, 3),
}
"""Operators that only move elements, so that they mean the same on bit patterns, to the arguments that they move."""


@dataclass(frozen=True)
class StableHLO:
    """A lowered graph.

    Attributes:
        text: the module. It takes the arguments of `parameters`, donates the KV cache and returns what the captured
            graph returns, KV caches as integers.
        parameters: for each parameter of the module, the flat argument of the captured graph it is.
    """

    text: str
    parameters: tuple[int, ...]


def lower(name: str, captured: Captured) -> StableHLO:
    """StableHLO of a captured graph.

    Raises:
        ValueError: torch_xla has no lowering of an operator, or would bake a value into the graph.
    """
    with _lock:
        hlo, parameters = _hlo(name, captured)
    return StableHLO(_stablehlo(name, hlo, parameters, captured), parameters)


def _hlo(name: str, captured: Captured) -> tuple[bytes, tuple[int, ...]]:
    """Serialized HLO, and which flat argument each of its parameters is."""
    torch_xla = import_torch_xla()
    from torch_xla.core import xla_builder

    lowering = torch_xla._XLAC.lowering
    check_operators(name, captured.module)
    kv = _kv_arguments(captured)
    arguments = [
        xla_builder.create_placeholder_tensor(leaf.shape, BITS[leaf.dtype.itemsize] if index in kv else leaf.dtype)
        for index, leaf in enumerate(captured.signature.arguments)
    ]
    # Otherwise torch_xla makes most Python numbers parameters of the graph, to compile less often when they change.
    torch_xla._XLAC._set_xla_all_numbers_special_scalars(True)
    results = _BitsInterpreter(captured).run(*arguments)
    context = lowering.LoweringContext(name)
    context.build(results)
    argument_of = {context.tensor_parameter_id(argument): index for index, argument in enumerate(arguments)}
    argument_of.pop(-1, None)
    if sorted(argument_of) != list(range(len(argument_of))):
        raise ValueError(f"{name}: torch_xla numbers the parameters {sorted(argument_of)}: a value was baked in")
    return context.hlo(), tuple(argument_of[parameter] for parameter in range(len(argument_of)))


def _kv_arguments(captured: Captured) -> range:
    """Which of the flat arguments are KV cache."""
    first = len(captured.signature.weights)
    return range(first, first + len(captured.signature.kv_cache))


def _stablehlo(name: str, hlo: bytes, parameters: tuple[int, ...], captured: Captured) -> str:
    """Text of serialized HLO, with the KV cache donated to the new one."""
    from jax._src.interpreters.mlir import make_ir_context
    from jaxlib import _jax
    from jaxlib.mlir import ir

    kv = _kv_arguments(captured)
    num_outputs = captured.signature.outputs.num_leaves
    with make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(hlo))
        main = next(f for f in module.body.operations if f.attributes["sym_name"] == ir.StringAttr.get("main"))
        attributes = []
        for argument in parameters:
            entry: dict[str, ir.Attribute] = {}
            if argument in kv:
                result = num_outputs + argument - kv.start
                entry["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)
            attributes.append(ir.DictAttr.get(entry))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        return str(module)


@dataclass(frozen=True)
class _Transposed:
    """The transpose of a matrix, not made yet: a product takes the matrix as it is."""

    matrix: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype


def _mm(x: torch.Tensor, y: torch.Tensor | _Transposed) -> torch.Tensor:
    # XLA has a loop of its own for a single row, and widens the weight if it is asked for anything else.
    if x.shape[0] == 1:
        return torch.mm(_numbers(x), _numbers(y))
    if isinstance(y, _Transposed):
        return _product(_numbers(x), y.matrix, (([1], [1]), ([], [])))
    return _product(_numbers(x), y, (([1], [0]), ([], [])))


def _bmm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _product(x, y, (([2], [1]), ([0], [0])))


def _addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor | _Transposed) -> torch.Tensor:
    return _mm(x, y) + bias


_PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _bmm,
    _aten.addmm.default: _addmm,
}
_HALF = (torch.bfloat16, torch.float16)


def _product(x: torch.Tensor, y: torch.Tensor, dimensions: Any) -> torch.Tensor:
    """A product in half precision that is summed in float32, and rounded only then.

    The sum is what torch does too. Said in so many words, XLA's CPU compiler multiplies the halves as they are; from
    torch_xla's own product of halves it makes one of float32, and widens the whole weight at every step.
    """
    import torch_xla

    return torch_xla._XLAC._xla_dot_general(x, y, dimensions, None, torch.float32).to(x.dtype)


def _wide_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [M, K] times the transpose of matrix [N, K], both in half precision: [M, N] float32, not rounded."""
    import torch_xla

    if x.shape[0] == 1:
        # As a product of one row XLA would widen the whole matrix first; as a sum it reads it once.
        return (x.float() * matrix.float()).sum(dim=1).unsqueeze(0)
    return torch_xla._XLAC._xla_dot_general(x, matrix, (([1], [1]), ([], [])), None, torch.float32)


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
    if not isinstance(target, torch._ops.OpOverload):
        return True
    kinds = ("XLA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    operator = target.name()
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator, kind) for kind in kinds)


@dataclass(frozen=True)
class _Bits:
    """A tensor of numbers of `dtype`, held as the integers that have the same bits."""

    integers: torch.Tensor
    dtype: torch.dtype


class _BitsInterpreter(Interpreter):
    """Runs a captured graph with its KV cache as bit patterns, for as long as the elements are only moved."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.module)
        kv = _kv_arguments(captured)
        arguments = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
        self._kv_dtypes = {arguments[index].name: captured.signature.arguments[index].dtype for index in kv}
        self._num_kv = len(kv)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        dtype = self._kv_dtypes.get(str(target))
        return value if dtype is None else _Bits(value, dtype)

    def run_node(self, n: Any) -> Any:
        if n.target is _aten.mm.default and _only_widened(n):
            x, y = self.fetch_args_kwargs_from_env(n)[0]
            if isinstance(y, _Transposed):
                return _wide_product(_numbers(x), y.matrix)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _aten.view.dtype and args[0].dtype.itemsize == args[1].itemsize:
            return bitcast(_numbers(args[0]), args[1])
        moved = _MOVES.get(target)
        if moved and isinstance(args[0], _Bits) and not _accumulates(target, args):
            dtype = args[0].dtype
            args = [_integers(arg) if index in moved else _numbers(arg) for index, arg in enumerate(args)]
            if target is _aten.index_copy.default:
                args = _write_twice(*args)
            return _Bits(super().call_function(target, tuple(args), kwargs), dtype)
        if target is _aten.t.default and isinstance(args[0], torch.Tensor) and args[0].dtype in _HALF:
            return _Transposed(args[0])
        if target in _PRODUCTS and args[-1].dtype in _HALF:
            return _PRODUCTS[target](*(arg if isinstance(arg, _Transposed) else _numbers(arg) for arg in args))
        args, kwargs = pytree.tree_map(_numbers, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "xla"}
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        results = list(args[0])
        first = len(results) - self._num_kv
        return [_numbers(result) for result in results[:first]] + [_integers(result) for result in results[first:]]


def _only_widened(node: Any) -> bool:
    """Whether a product is read as float32 and nothing else, as logits are: then it need not be rounded at all."""
    conversions = [user.target is _aten._to_copy.default and user.kwargs.get("dtype") for user in node.users]
    return bool(conversions) and all(dtype is torch.float32 for dtype in conversions)


def _accumulates(target: Any, args: tuple[Any, ...]) -> bool:
    return target is _aten.index_put.default and args[3:4] == (True,)


def _write_twice(
    cache: torch.Tensor, dim: int, index: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """Arguments of the same index_copy with a single row repeated.

    XLA makes a scatter of one row a slice update, which its CPU compiler fuses such that all of the cache is rewritten.
    """
    if index.shape[0] != 1:
        return cache, dim, index, rows
    return cache, dim, torch.cat([index, index]), torch.cat([rows, rows], dim)


def _numbers(value: Any) -> Any:
    if isinstance(value, _Transposed):
        return value.matrix.t()
    return bitcast(value.integers, value.dtype) if isinstance(value, _Bits) else value


def _integers(value: Any) -> torch.Tensor:
    return value.integers if isinstance(value, _Bits) else bitcast(value, BITS[value.dtype.itemsize])


def bitcast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bits as another dtype of the same width. torch_xla runs `Tensor.view(dtype)` eagerly, hence this."""
    from torch_xla.core import xla_builder as xb

    builder = xb.create_builder("bitcast")
    shape = xb.mkshape(xb.Op.from_torch_type(tensor.dtype), tuple(tensor.shape))
    operand = xb.mkparam(builder, 0, shape)
    operation = xb.mkop("BitcastConvert", (operand.op,), to_type=xb.Op.from_torch_type(dtype))
    return xb.xla_computation_as_func(operation.build("bitcast"), "bitcast")([tensor])[0]
