"""From a GraphSpec to an executable: the arguments' shapes, the trace, the cache key, the cache."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_neuron.compilation.artifacts import open_artifacts
from vllm_neuron.compilation.cache import CacheFolders, CompileCache, Kept, Source, local_cache_root
from vllm_neuron.compilation.key import GraphKey, graph_key, host_target, trace_fingerprint
from vllm_neuron.compilation.store import Manifest
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.sampled_inputs import input_builder
from vllm_neuron.engine.steps import step_function
from vllm_neuron.kernels.dispatch import Selection, select, using
from vllm_neuron.kernels.simulator import real_package
from vllm_neuron.kv_cache.layout import KVCache, cache_dtype, layer_shapes
from vllm_neuron.models.model import Model
from vllm_neuron.routes.neuronx_cc import logical_cores
from vllm_neuron.routes.route import Executable, Lowered, Route, Traced
from vllm_neuron.weights.table import Weights

logger = logging.getLogger(__name__)


class CompileForbiddenError(RuntimeError):
    """A graph would have to be compiled where the configuration does not allow it."""


@dataclass(frozen=True)
class CompiledGraph:
    """An executable and where it came from.

    Attributes:
        executable: ready to be called.
        source: where it came from: a tier of the cache, or the compiler.
        manifest: what its entry says of itself: key, size and the like.
        seconds: how long it took to get it.
    """

    executable: Executable
    source: Source
    manifest: Manifest
    seconds: float


def open_cache(config: ResolvedConfig, route: Route) -> CompileCache:
    """The compile cache that a configuration asks for.

    Raises:
        ArtifactsError: NEURON_COMPILED_ARTIFACTS is no folder of compiled graphs, and cannot become one.
    """
    if config.disable_compile_cache:
        return CompileCache(CacheFolders(), route.name)
    artifacts = Path(config.compiled_artifacts) if config.compiled_artifacts else None
    if artifacts is not None:
        open_artifacts(artifacts)
    remote = Path(config.remote_cache) if config.remote_cache else None
    return CompileCache(CacheFolders(local_cache_root(), artifacts, remote), route.name)


def kernels_of(config: ResolvedConfig) -> Selection:
    """The kernels that a configuration's graphs are traced with.

    Raises:
        CompilerError: NEURON_LOGICAL_NC_CONFIG has a bad value.
    """
    return select(
        config.backend,
        config.cpu_mode,
        disabled=config.disable_nki_kernels,
        simulated=config.nki_simulator,
        torch_mask=config.attn_mask_torch,
        cores=1 if config.cpu_mode else logical_cores(),
        nki_installed=real_package(),
    )


class GraphCompiler:
    """Compiles the graphs of one model at one configuration; needs shapes only, no weights and no KV cache.

    Attributes:
        model: what to compile.
        config: the resolved configuration.
        route: how to compile it.
        cache: where compiled graphs are kept.
        dtype: of weights and activations, and of a KV cache that has none of its own.
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
        self.model = model
        self.config = config
        self.route = route
        self.cache = cache
        self.dtype = dtype
        self.num_blocks = num_blocks
        self._kernels = kernels_of(config)
        self._versions = route.versions()
        platform = route.target.platform
        self._target = host_target() if platform == "cpu" else platform

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
        kept = self._load_indexed(fingerprint, graph)
        if kept is None:
            lowered = self.lower(graph)
            key = self.key(lowered)

            def compile_now() -> tuple[Executable, bytes]:
                if not may_compile:
                    raise CompileForbiddenError(
                        f"Graph {graph.name} of the {self.route.name} route is not in the compile cache (key "
                        f"{key.digest}), and VLLM_NEURON_DISABLE_WARMUP_COMPILE=1 forbids compiling it. "
                        f"{self.cache.why_missing(key, graph.name)} Compile once with the same configuration, "
                        "versions and folders without that variable, or unset it."
                    )
                if self.cache.reads_artifacts:
                    logger.warning(
                        "NEURON_COMPILED_ARTIFACTS=%s has no graph %s of this configuration, so it is compiled. %s",
                        self.cache.folders.artifacts,
                        graph.name,
                        self.cache.why_missing(key, graph.name),
                    )
                executable = lowered.compile()
                return executable, executable.save()

            kept = self.cache.get_or_compile(key, graph.name, self.model.architecture, self.route.load, compile_now)
            if fingerprint is not None:
                self.cache.note(fingerprint, key.digest, graph.name)
        return CompiledGraph(*kept, time.monotonic() - start)

    def load(self, graph: GraphSpec) -> CompiledGraph | None:
        """The executable of a graph if the cache is known to have it; nothing is traced. Threads may call it."""
        start = time.monotonic()
        kept = self._load_indexed(self.fingerprint(graph), graph)
        return None if kept is None else CompiledGraph(*kept, time.monotonic() - start)

    def is_cached(self, graph: GraphSpec) -> bool:
        """Whether the cache is known to have a graph; found out without tracing it or reading its executable."""
        fingerprint = self.fingerprint(graph)
        key = self.cache.indexed_key(fingerprint) if fingerprint is not None else None
        return key is not None and self.cache.has(key)

    def key(self, lowered: Lowered) -> GraphKey:
        """The cache key of a lowered graph."""
        return graph_key(
            lowered.text(),
            lowered.arguments(),
            self.route.name,
            self._target,
            self._versions,
            {"tensor": self.config.tensor_parallel_size},
            self.route.flags(),
            self.route.modules,
            lowered.kernel_packages(),
        )

    def lower(self, graph: GraphSpec) -> Lowered:
        """The graph in the route's own representation; nothing is compiled."""
        traced = self.trace(graph)
        with using(*self._kernels.sets, options=self._kernels.options):
            return traced.lower()

    def trace(self, graph: GraphSpec) -> Traced:
        """The graph as it is captured, before the route's own lowering."""
        with using(*self._kernels.sets, options=self._kernels.options):
            return self.route.trace(graph.name, step_function(graph, self.model), *self._arguments(graph))

    def fingerprint(self, graph: GraphSpec) -> str | None:
        """Stands for everything that `lower` reads; None if that cannot be known without tracing."""
        traced = (
            graph,
            self.model,
            self.dtype,
            self.num_blocks,
            self.config.block_size,
            self.config.tensor_parallel_size,
            self._kernels.sets,
            self._kernels.options,
            self.route.flags(),
        )
        return trace_fingerprint(self.route.name, self._versions, self._target, traced)

    def _load_indexed(self, fingerprint: str | None, graph: GraphSpec) -> Kept[Executable] | None:
        key = self.cache.indexed_key(fingerprint) if fingerprint is not None else None
        kept = self.cache.fetch(key, self.route.load) if key is not None else None
        if kept is not None and fingerprint is not None and key is not None:
            # A tier that was just given the entry is told what leads to it, too.
            self.cache.note(fingerprint, key, graph.name)
        return kept

    def _arguments(self, graph: GraphSpec) -> tuple[Weights, KVCache, Any]:
        """Weights, KV cache and inputs of a graph as meta tensors: shapes, strides and dtypes, no memory."""
        table = self.model.weight_table
        weights = {
            name: torch.empty(spec.shape, dtype=spec.dtype or self.dtype, device="meta") for name, spec in table.items()
        }
        weights |= {name: _to_meta(tensor) for name, tensor in self.model.constants.items()}
        if graph.kind == "prompt_logits":
            hidden = torch.empty(graph.tokens, self.model.hidden_size, dtype=self.dtype, device="meta")
            return weights, [], hidden
        model, config = self.model, self.config
        dtype = cache_dtype(model.kv_layers, self.dtype)
        shapes = layer_shapes(model.kv_layers, self.num_blocks, config.block_size)
        kv_cache = [
            (torch.empty(s, dtype=dtype, device="meta"), torch.empty(s, dtype=dtype, device="meta")) for s in shapes
        ]
        builder = input_builder(graph, config.block_size, model, self.dtype)
        return weights, kv_cache, pytree.tree_map(_to_meta, builder.build(()))


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
