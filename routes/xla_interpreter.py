"""Runs a captured graph on torch_xla's lazy tensors, which turns it into HLO."""

from typing import Any

import torch
from torch.fx import Interpreter

from vllm_neuron.routes.capture import Captured

_aten = torch.ops.aten


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
        return super().run_node(n)

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


def dot(x: torch.Tensor, y: torch.Tensor, dimensions: Any) -> torch.Tensor:
    """A product that is summed in float32, and left so."""
    import torch_xla

    return torch_xla._XLAC._xla_dot_general(x, y, dimensions, None, torch.float32)


def bitcast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bits as another dtype of the same width. torch_xla runs `Tensor.view(dtype)` eagerly, hence this."""
    from torch_xla.core import xla_builder as xb

    builder = xb.create_builder("bitcast")
    shape = xb.mkshape(xb.Op.from_torch_type(tensor.dtype), tuple(tensor.shape))
    operand = xb.mkparam(builder, 0, shape)
    operation = xb.mkop("BitcastConvert", (operand.op,), to_type=xb.Op.from_torch_type(dtype))
    return xb.xla_computation_as_func(operation.build("bitcast"), "bitcast")([tensor])[0]
