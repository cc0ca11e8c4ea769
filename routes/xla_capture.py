"""Capture of a pure step as an FX graph of ATen operators, from shapes alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from vllm_neuron.routes.route import PyTree, Step


@dataclass(frozen=True)
class Captured:
    """A step over flat tensors: the weights, then the KV cache, then the inputs.

    Attributes:
        graph: flat arguments -> flat outputs followed by the flat new KV cache.
        weights: path of each argument that is a weight; these come first.
        num_kv: arguments that are KV cache; they follow, and so many of the last results are the new cache.
        outputs: tree of the outputs without the cache.
    """

    graph: GraphModule
    weights: tuple[str, ...]
    num_kv: int
    outputs: pytree.TreeSpec


def capture(name: str, step: Step, weights: PyTree, kv_cache: PyTree, inputs: PyTree) -> Captured:
    """The graph of `step` for tensors of these shapes, dtypes and strides; no value is looked at.

    Raises:
        ValueError: the step reads values, keeps a tensor of its own, changes an argument, or returns a KV cache that
            is not shaped like the one it was given.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedFakeTensorException,
    )
    from torch.fx.experimental.proxy_tensor import make_fx

    groups = [pytree.tree_flatten(tree) for tree in (weights, kv_cache, inputs)]
    counts = [len(leaves) for leaves, _ in groups]
    outputs_spec: list[pytree.TreeSpec] = []

    def flat_step(*flat: torch.Tensor) -> list[torch.Tensor]:
        trees, start = [], 0
        for count, (_, spec) in zip(counts, groups, strict=True):
            trees.append(pytree.tree_unflatten(flat[start : start + count], spec))
            start += count
        outputs, new_cache = step(*trees)
        flat_outputs, spec = pytree.tree_flatten(outputs)
        outputs_spec.append(spec)
        flat_cache = pytree.tree_leaves(new_cache)
        _check_cache(name, flat[counts[0] : counts[0] + counts[1]], flat_cache)
        return [*flat_outputs, *flat_cache]

    with FakeTensorMode(allow_non_fake_inputs=False) as mode, torch.no_grad():
        arguments = [_fake(leaf) for leaves, _ in groups for leaf in leaves]
        versions = [argument._version for argument in arguments]
        try:
            graph = make_fx(flat_step, decomposition_table=_decompositions())(*arguments)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"{name}: the step depends on tensor values ({error}); select with masks instead"
            ) from error
        except (UnsupportedFakeTensorException, AssertionError) as error:
            if "non-Fake" not in str(error) and "FakeTensor" not in str(error):
                raise
            raise ValueError(f"{name}: the step uses a tensor that is not an argument; pass it as a weight") from error
        if [argument._version for argument in arguments] != versions:
            raise ValueError(f"{name}: the step changes an argument in place; return a new tensor instead")
        del mode
    _check_constants(name, graph)
    paths = tuple(pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(weights)[0])
    return Captured(graph, paths, counts[1], outputs_spec[-1])


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import get_decompositions

    return get_decompositions([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu])


def _check_cache(name: str, old: tuple[torch.Tensor, ...], new: list[torch.Tensor]) -> None:
    forms = [[(tuple(tensor.shape), tensor.dtype) for tensor in cache] for cache in (old, new)]
    if forms[0] != forms[1]:
        raise ValueError(f"{name}: the step returns a KV cache of {forms[1]}, but was given {forms[0]}")


def _check_constants(name: str, graph: GraphModule) -> None:
    held = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    if held:
        raise ValueError(f"{name}: the step makes {len(held)} tensors from Python values; pass them as weights")


def placeholders(graph: GraphModule) -> list[Node]:
    """The argument nodes in order."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]
