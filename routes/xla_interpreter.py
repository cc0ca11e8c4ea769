"""Runs a captured graph on torch_xla's lazy tensors, which turns it into HLO."""

from typing import Any

import torch
from torch.fx import Interpreter, Node

from vllm_neuron.routes import xla_kernels
from vllm_neuron.routes.capture import Captured

_aten = torch.ops.aten

_FP8_TYPES = {torch.float8_e4m3fn: "f8e4m3fn"}
"""XLA's names of dtypes that torch_xla lowers, and whose names it does not tell."""


class XlaInterpreter(Interpreter):
    """Lowers every operator as torch_xla does, but for what it has no good lowering of."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.module)

    @staticmethod
    def kv_dtype(dtype: torch.dtype) -> torch.dtype:
        """Dtype of the lowered graph's KV cache, where the captured graph's is ``dtype``."""
        return dtype

    def run_node(self, n: Any) -> Any:
        """The value of a node."""
        if n.target is _aten.mm.default and _only_widened(n):
            x, y = self.fetch_args_kwargs_from_env(n)[0]
            return self.wide_product(x, y)
        if n.target is _aten.sort.stable:
            (x,), kwargs = self.fetch_args_kwargs_from_env(n)
            return _sort(x, kwargs, _largest_wanted(n))
        if xla_kernels.is_kernel(n.target):
            args, _ = self.fetch_args_kwargs_from_env(n)
            forms = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in n.args]
            return xla_kernels.emit(n.target, [self.held(value) for value in args], forms, n.meta["val"])
        return super().run_node(n)

    def held(self, value: Any) -> Any:
        """A value of the graph as it lies in memory, with the bits that it has in the captured graph."""
        return value

    def wide_product(self, x: Any, y: Any) -> torch.Tensor:
        """x [M, K] times y [K, N]: [M, N] float32, not rounded to the factors' dtype."""
        return dot(x, y, (([1], [0]), ([], [])))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The value of an operator."""
        if target is _aten.view.dtype and args[0].dtype.itemsize == args[1].itemsize:
            return bitcast(args[0], args[1])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "xla"}
        return super().call_function(target, args, kwargs)


def _only_widened(node: Any) -> bool:
    """Whether a product is read as float32 and nothing else, as logits are: then it need not be rounded at all."""
    conversions = [user.target is _aten._to_copy.default and user.kwargs.get("dtype") for user in node.users]
    return bool(conversions) and all(dtype is torch.float32 for dtype in conversions)


def _sort(x: torch.Tensor, kwargs: Any, largest: int | None) -> tuple[torch.Tensor, ...]:
    """A stable sort, or the first `largest` of it in falling order.

    A whole sort costs thirty times as much. XLA's CPU compiler recognises what torch_xla makes of a search for the
    largest, and has a routine for it that puts equal elements in the order of their columns, as a stable sort does.
    Neither has been tried with Neuron's compiler.
    """
    # XLA orders zeros by their sign, which a comparison of numbers does not.
    x = torch.where(x == 0, 0.0, x)
    return torch.sort(x, **kwargs) if largest is None else apart(*torch.topk(x, largest, dim=-1))


def _largest_wanted(node: Any) -> int | None:
    """How many elements of a sort along the last dimension are read, if only the largest are."""
    shape = node.args[0].meta["val"].shape
    last = (-1, len(shape) - 1)
    if not node.kwargs.get("descending") or node.kwargs.get("dim", -1) not in last:
        return None
    ends = {
        read.args[3] if read.target is _aten.slice.Tensor and read.args[1] in last and read.args[2] == 0 else None
        for part in node.users
        for read in part.users
    }
    end = ends.pop() if len(ends) == 1 else None
    return None if end == shape[-1] else end


def apart(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, behind a barrier to XLA's optimizer: it must not merge what comes before with what comes after."""
    import torch_xla

    torch_xla._XLAC._xla_optimization_barrier_(list(tensors))
    return tensors


def dot(x: torch.Tensor, y: torch.Tensor, dimensions: Any) -> torch.Tensor:
    """A product that is summed in float32, and left so."""
    import torch_xla

    return torch_xla._XLAC._xla_dot_general(x, y, dimensions, None, torch.float32)


def bitcast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bits as another dtype of the same width. torch_xla runs `Tensor.view(dtype)` eagerly, hence this."""
    from torch_xla.core import xla_builder as xb

    builder = xb.create_builder("bitcast")
    source, target = (_FP8_TYPES.get(d) or xb.Op.from_torch_type(d) for d in (tensor.dtype, dtype))
    operand = xb.mkparam(builder, 0, xb.mkshape(source, tuple(tensor.shape)))
    operation = xb.mkop("BitcastConvert", (operand.op,), to_type=target)
    return xb.xla_computation_as_func(operation.build("bitcast"), "bitcast")([tensor])[0]
