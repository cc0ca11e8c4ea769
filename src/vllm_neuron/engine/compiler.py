"""From a GraphSpec to an executable: the arguments' shapes, the trace, the cache key, the cache."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_neuron.compilation.cache import CompileCache
from vllm_neuron.compilation.key import graph_key, host_target, trace_fingerprint
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.inputs import InputBuilder
from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kv_cache.layout import KVCache, layer_shapes, num_groups
from vllm_neuron.models.model import Model
from vllm_neuron.routes.route import Executable, Lowered, Route
from vllm_neuron.weights.table import Weights

logger = logging.getLogger(__name__)


class CompileForbiddenError(RuntimeError):
    """A graph would have to be compiled where the configuration does not allow it."""


@dataclass(frozen=True)
class CompiledGraph:
    """An executable and where it came from.

    Attributes:
        executable: ready to be called.
        cached: it came from the compile cache.
        seconds: how long it took to get it.
    """

    executable: Executable
    cached: bool
    seconds: float


def kernel_set_of(config: ResolvedConfig) -> KernelSet:
    """The kernels that a configuration's graphs are traced with."""
    native_on_cpu = config.backend == "neuron_native" and config.cpu_mode
    return KernelSet.CPU if native_on_cpu and not config.disable_nki_kernels else KernelSet.TORCH


class GraphCompiler:
    """Compiles the graphs of one model at one configuration; needs shapes only, no weights and no KV cache.

    Args:
        model: what to compile.
        config: the resolved configuration.
        route: how to compile it.
        cache: where compiled graphs are kept.
        dtype: of weights, activations and KV cache.
        num_blocks: NB, blocks of the KV cache.
    """

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        route: Route,
        cache: CompileCache,
        dtype: torch.dtype,
        num_blocks: int,
    ) -> None:
        self._model = model
        self._config = config
        self._route = route
        self._cache = cache
        self._dtype = dtype
        self._num_blocks = num_blocks
        self._kernels = kernel_set_of(config)
        self._versions = route.versions()
        self._target = host_target() if config.cpu_mode else "neuron"

    def compile(self, graph: GraphSpec, may_compile: bool = True) -> CompiledGraph:
        """The executable of a graph, from the cache if it is there.

        Args:
            graph: the graph.
            may_compile: whether a graph that is not in the cache may be compiled.

        Raises:
            CompileForbiddenError: it is not in the cache, and ``may_compile`` is false.
        """
        start = time.monotonic()
        fingerprint = self.fingerprint(graph)
        executable = self._load_indexed(fingerprint)
        compiled_here = False
        if executable is None:
            lowered = self.lower(graph)
            key = graph_key(lowered.text(), self._route.name, self._versions, self._target)

            def compile_now() -> tuple[Executable, bytes]:
                nonlocal compiled_here
                if not may_compile:
                    raise CompileForbiddenError(
                        f"Graph {graph.name} of the {self._route.name} route is not in the compile cache (key {key}), "
                        "and VLLM_NEURON_DISABLE_WARMUP_COMPILE=1 forbids compiling it. Compile once with the same "
                        "configuration, versions and VLLM_CACHE_ROOT without that variable, or unset it."
                    )
                compiled_here = True
                executable = lowered.compile()
                return executable, executable.save()

            executable = self._cache.get_or_compile(key, graph.name, self._route.load, compile_now)
            if fingerprint is not None:
                self._cache.note(fingerprint, key, graph.name)
        return CompiledGraph(executable, not compiled_here, time.monotonic() - start)

    def lower(self, graph: GraphSpec) -> Lowered:
        """The graph in the route's own representation; nothing is compiled."""
        with using(self._kernels):
            traced = self._route.trace(graph.name, self._step(graph), *self._arguments(graph))
            return traced.lower()

    def fingerprint(self, graph: GraphSpec) -> str | None:
        """Stands for everything that `lower` reads; None if that cannot be known without tracing."""
        traced = (
            graph,
            self._model,
            self._dtype,
            self._num_blocks,
            self._config.block_size,
            self._kernels,
        )
        return trace_fingerprint(self._route.name, self._versions, self._target, traced)

    def _load_indexed(self, fingerprint: str | None) -> Executable | None:
        key = self._cache.indexed_key(fingerprint) if fingerprint is not None else None
        return self._cache.fetch(key, self._route.load) if key is not None else None

    def _step(self, graph: GraphSpec) -> Callable[..., Any]:
        return partial(_prompt_logits_step, self._model) if graph.kind == "prompt_logits" else self._model.step

    def _arguments(self, graph: GraphSpec) -> tuple[Weights, KVCache, Any]:
        """Weights, KV cache and inputs of a graph as meta tensors: shapes, strides and dtypes, no memory."""
        table = self._model.weight_table
        weights = {
            name: torch.empty(spec.shape, dtype=spec.dtype or self._dtype, device="meta")
            for name, spec in table.items()
        }
        weights |= {name: _to_meta(tensor) for name, tensor in self._model.constants.items()}
        if graph.kind == "prompt_logits":
            hidden = torch.empty(graph.tokens, self._model.hidden_size, dtype=self._dtype, device="meta")
            return weights, [], hidden
        shapes = layer_shapes(self._model.kv_layers, self._num_blocks, self._config.block_size)
        kv_cache = [
            (torch.empty(s, dtype=self._dtype, device="meta"), torch.empty(s, dtype=self._dtype, device="meta"))
            for s in shapes
        ]
        builder = InputBuilder(graph, self._config.block_size, num_groups(self._model.kv_layers))
        return weights, kv_cache, pytree.tree_map(_to_meta, builder.build(()))


def _prompt_logits_step(
    model: Model, weights: Weights, kv_cache: KVCache, hidden: torch.Tensor
) -> tuple[torch.Tensor, KVCache]:
    """hidden [T, H] -> logits [T, V] float32; takes and returns a KV cache of no layers."""
    return model.logits(weights, hidden), kv_cache


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
