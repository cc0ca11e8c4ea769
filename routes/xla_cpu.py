"""What XLA's CPU compiler needs to have said differently. None of it is for Neuron's compiler.

- KV caches are integers of the same width, and become numbers only after the gather: a half-precision cache is widened
  around its scatter, and so all of it is copied at every step. Neuron writes rows where they are, in any dtype.
- Products of halves are summed in float32 in so many words. Neuron sums in float32 anyway.
- A single row has forms of its own. On Neuron one row is a product like any other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_neuron.routes.capture import Captured
from vllm_neuron.routes.xla_interpreter import XlaInterpreter, bitcast, dot

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype that stores the bit pattern of a number of so many bytes."""

_aten = torch.ops.aten

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


_HALF = (torch.bfloat16, torch.float16)


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


def _product(x: torch.Tensor, y: torch.Tensor, dimensions: Any) -> torch.Tensor:
    """A product in half precision that is summed in float32, and rounded only then.

    The sum is what torch does too. Said in so many words, XLA's CPU compiler multiplies the halves as they are; from
    torch_xla's own product of halves it makes one of float32, and widens the whole weight at every step.
    """
    return dot(x, y, dimensions).to(x.dtype)


@dataclass(frozen=True)
class _Bits:
    """A tensor of numbers of `dtype`, held as the integers that have the same bits."""

    integers: torch.Tensor
    dtype: torch.dtype


class CpuInterpreter(XlaInterpreter):
    """Runs a captured graph with its KV cache as bit patterns, for as long as the elements are only moved."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured)
        kv = captured.signature.kv_range
        arguments = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
        self._kv_dtypes = {arguments[index].name: captured.signature.arguments[index].dtype for index in kv}
        self._num_kv = len(kv)

    @staticmethod
    def kv_dtype(dtype: torch.dtype) -> torch.dtype:
        """The integer of the same width."""
        return BITS[dtype.itemsize]

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An argument."""
        value = super().placeholder(target, args, kwargs)
        dtype = self._kv_dtypes.get(str(target))
        return value if dtype is None else _Bits(value, dtype)

    def held(self, value: Any) -> Any:
        """A value of the graph as it lies in memory: a KV cache as its integers."""
        return value.integers if isinstance(value, _Bits) else _numbers(value)

    def wide_product(self, x: Any, y: Any) -> torch.Tensor:
        """x [M, K] times y [K, N]: [M, N] float32, not rounded to the factors' dtype."""
        x = _numbers(x)
        if not isinstance(y, _Transposed):
            return super().wide_product(x, _numbers(y))
        if x.shape[0] == 1:
            # As a product of one row XLA would widen the whole matrix first; as a sum it reads it once.
            return (x.float() * y.matrix.float()).sum(dim=1).unsqueeze(0)
        return dot(x, y.matrix, (([1], [1]), ([], [])))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The value of an operator."""
        moved = _MOVES.get(target)
        if moved and isinstance(args[0], _Bits) and not _accumulates(target, args):
            dtype = args[0].dtype
            args = [_integers(arg) if index in moved else _numbers(arg) for index, arg in enumerate(args)]
            if target is _aten.index_copy.default:
                args = _write_twice(*args)
            return _Bits(super().call_function(target, tuple(args), kwargs), dtype)
        if target is _aten.view.dtype and isinstance(args[0], _Bits) and args[0].dtype.itemsize == args[1].itemsize:
            return _Bits(args[0].integers, args[1])
        if target is _aten.t.default and isinstance(args[0], torch.Tensor) and args[0].dtype in _HALF:
            return _Transposed(args[0])
        if target in _PRODUCTS and args[-1].dtype in _HALF:
            return _PRODUCTS[target](*(arg if isinstance(arg, _Transposed) else _numbers(arg) for arg in args))
        args, kwargs = pytree.tree_map(_numbers, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The results: numbers, then the KV cache as integers."""
        results = list(args[0])
        first = len(results) - self._num_kv
        return [_numbers(result) for result in results[:first]] + [_integers(result) for result in results[first:]]


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
