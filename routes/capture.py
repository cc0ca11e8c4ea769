"""Capture of a pure step as an FX graph of operators, from shapes alone.

The step runs once on fake tensors, so nothing is computed, no Python branch can depend on a value, and there is no
graph break and no guard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from vllm_neuron.routes.route import PyTree, Step


class Leaf(NamedTuple):
    """One tensor argument: where it is in its tree, and the form the graph is specialised to."""

    path: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, path: str, tensor: torch.Tensor) -> "Leaf":
        return cls(path, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.path}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)} stride {list(self.stride)}"


@dataclass(frozen=True)
class Signature:
    """How the flat arguments and results of a graph relate to the trees of a step.

    Attributes:
        weights: the weights the graph was traced with, in order.
        kv_cache: keys and values of each layer in turn.
        inputs: leaves of the step's inputs.
        outputs: tree of the outputs, the KV cache not among them.
    """

    weights: tuple[Leaf, ...]
    kv_cache: tuple[Leaf, ...]
    inputs: tuple[Leaf, ...]
    outputs: pytree.TreeSpec

    @property
    def arguments(self) -> tuple[Leaf, ...]:
        return self.weights + self.kv_cache + self.inputs

    @property
    def kv_range(self) -> range:
        """Which of the arguments are KV cache."""
        return range(len(self.weights), len(self.weights) + len(self.kv_cache))

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.arguments, f"outputs: {self.outputs}")))


@dataclass(frozen=True)
class Captured:
    """A graph over flat tensors: weights, KV cache, inputs -> outputs, new KV cache."""

    module: fx.GraphModule
    signature: Signature


def capture(
    name: str, step: Step, weights: PyTree, kv_cache: PyTree, inputs: PyTree, in_place: bool = False
) -> Captured:
    """The graph of `step` for tensors of these shapes, dtypes and strides; no value is looked at.

    Args:
        in_place: whether the step may write to its arguments instead of returning new tensors.

    Raises:
        ValueError: the step depends on the values of tensors, holds a tensor that is no argument of it, writes to an
            argument though it may not, or returns a KV cache of another form than it was given.
    """
    from torch._decomp import get_decompositions
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )
    from torch.fx.experimental.proxy_tensor import make_fx

    groups = [pytree.tree_flatten_with_path(tree) for tree in (weights, kv_cache, inputs)]
    leaves = [
        tuple(Leaf.of(kind + pytree.keystr(path), tensor) for path, tensor in flat)
        for kind, (flat, _) in zip(("weights", "kv_cache", "inputs"), groups, strict=True)
    ]
    outputs_spec: list[pytree.TreeSpec] = []

    def flat_step(*flat: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(flat)
        trees = [pytree.tree_unflatten([next(remaining) for _ in group], spec) for group, spec in groups]
        outputs, new_cache = step(*trees)
        flat_outputs, spec = pytree.tree_flatten(outputs)
        outputs_spec.append(spec)
        flat_cache = pytree.tree_leaves(new_cache)
        _check_cache(name, leaves[1], flat_cache)
        return [*flat_outputs, *flat_cache]

    decompositions: Any = get_decompositions([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu])
    with FakeTensorMode(), torch.no_grad():
        arguments = [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype) for group in leaves for leaf in group
        ]
        versions = [argument._version for argument in arguments]
        try:
            module = make_fx(flat_step, decomposition_table=decompositions)(*arguments)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"{name}: the step depends on the values of tensors ({error.func}), which are not known when it is "
                "compiled. Select with torch.where or a mask instead."
            ) from error
        except AssertionError as error:
            if "FakeTensor" not in str(error):
                raise
            raise ValueError(
                f"{name}: the step uses a tensor that is no argument of it. Pass it among the weights."
            ) from error
        if not in_place and [argument._version for argument in arguments] != versions:
            raise ValueError(f"{name}: the step changes an argument in place. Return a new tensor instead.")
    if any(node.op == "get_attr" for node in module.graph.nodes):
        raise ValueError(f"{name}: the step makes a tensor out of Python values. Pass it among the weights.")
    module.graph.eliminate_dead_code()
    module.recompile()
    return Captured(module, Signature(leaves[0], leaves[1], leaves[2], outputs_spec[-1]))


def _check_cache(name: str, old: Sequence[Leaf], new: Sequence[torch.Tensor]) -> None:
    before = [(leaf.shape, leaf.dtype) for leaf in old]
    after = [(tuple(tensor.shape), tensor.dtype) for tensor in new]
    if before != after:
        raise ValueError(f"{name}: the step returns a KV cache of {after}, but was given {before}")
