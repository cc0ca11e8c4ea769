"""Owns weights, KV cache and executables, and runs steps. The only place where a graph is executed."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_neuron.compilation.cache import CompileCache
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.compiler import CompiledGraph, CompileForbiddenError, GraphCompiler, kernels_of
from vllm_neuron.engine.graphs import (
    GraphSpec,
    decode_graph,
    layers_graph,
    list_graphs,
    prefill_graph,
    prompt_logits_graph,
)
from vllm_neuron.engine.inputs import NOT_FED, InputBuilder, Row
from vllm_neuron.engine.precompile import Compile, precompiled
from vllm_neuron.engine.progress import GraphReady, Report, warm_up_progress
from vllm_neuron.engine.queue import DeviceQueue
from vllm_neuron.engine.sampled_inputs import SampledInputBuilder, SampledInputs, feed, input_builder
from vllm_neuron.kernels.dispatch import fp8_cache_warning, prepare_weights
from vllm_neuron.kv_cache.budget import host_memory_available
from vllm_neuron.kv_cache.layout import cache_dtype, layer_shapes
from vllm_neuron.models.model import LayerOutputs, Model, StepOutputs
from vllm_neuron.routes.route import Executable, Placed, Route
from vllm_neuron.sampling import Sampled, SampledWithLogprobs
from vllm_neuron.weights.table import Weights

logger = logging.getLogger(__name__)

STEPS_UNDER_WAY = 2
"""Where steps are asynchronous: one runs, and one is prepared or waits."""
_PREPARED_FRACTION = 8
"""One in so many bytes that the host has left may be taken for a second form of the weights."""


@dataclass
class GraphStatistics:
    """What became of the graphs.

    Attributes:
        compiled: graphs compiled by this start, whether by this process or by its own compile workers.
        cached: graphs that came from the compile cache.
        compiles_after_warmup: compilations that a step asked for; anything but 0 is a fault.
        seconds: per graph name, time until it was ready.
        executions: per graph name, steps run; warm-up is not counted.
        live_rows: per graph name, rows of these steps that were no padding; tokens of a prefill, requests of a decode.
    """

    compiled: int = 0
    cached: int = 0
    compiles_after_warmup: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    executions: Counter[str] = field(default_factory=Counter)
    live_rows: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class SubmittedStep:
    """A step that samples and has been handed to its executable.

    Attributes:
        requests: n, live rows of the step.
        sampled: what the graph returns, once it has run: token ids [P], the rest [B, ...].
    """

    requests: int
    sampled: "Future[Sampled | SampledWithLogprobs]"

    def collect(self) -> Sampled | SampledWithLogprobs:
        """Wait for the tokens of the live rows, and what belongs to them: [n, ...]."""
        sampled = self.sampled.result()
        return type(sampled)(*(tensor[: self.requests] for tensor in sampled))


class GraphExecutor:
    """Runs one model. Use it in this order: construct, `allocate_kv_cache`, `warm_up`, steps.

    Where the host samples, steps are `run_prefill` and `run_decode`; where the graphs do, `submit_prefill` and
    `submit_decode`.

    Args:
        model: the model.
        config: the resolved configuration.
        route: compiles and runs the graphs.
        cache: compiled graphs.
        weights: every weight of the model's table; the model's constants are added here. The caller drops its own
            references, because the route may keep another form.
        dtype: of weights and activations, and of a KV cache that has none of its own.
        on_step: is told of each step that is handed to its graph: the graph, and how many rows are not padding.
            Warm-up is not a step.
        graphs: what to run, if not every graph that serving the configuration can need.
    """

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        route: Route,
        cache: CompileCache,
        weights: Weights,
        dtype: torch.dtype,
        *,
        on_step: Callable[[GraphSpec, int], None] | None = None,
        graphs: Sequence[GraphSpec] | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._route = route
        self._cache = cache
        self._dtype = dtype
        self.graphs = list_graphs(config) if graphs is None else tuple(graphs)
        self.statistics = GraphStatistics()
        self._on_step = on_step
        # In the order of the table, as they are traced: a route may go by position.
        ordered = {name: weights[name] for name in model.weight_table}
        self._weights: Placed = route.place_weights({**ordered, **model.constants})
        multiplied = (ordered[name] for name, spec in model.weight_table.items() if not spec.looked_up)
        self._unprepared = tuple(multiplied) if config.cpu_mode else ()
        self._prepared: object = None
        self._compiler: GraphCompiler | None = None
        self._kv_cache: Placed | None = None
        self._no_kv_cache: Placed = route.allocate_kv_cache((), dtype)
        self._executables: dict[GraphSpec, Executable] = {}
        self._queue = DeviceQueue(config.async_scheduling)
        # A step that is prepared must not write where one that still runs reads.
        copies = STEPS_UNDER_WAY if config.async_scheduling else 1
        self._builders: list[dict[GraphSpec, InputBuilder | SampledInputBuilder]] = [
            {g: input_builder(g, config.block_size, model, dtype) for g in self.graphs if g.context}
            for _ in range(copies)
        ]
        self._latest: deque[Future[Any]] = deque(maxlen=copies)
        self._failed = False
        logits_graph = prompt_logits_graph(self.graphs)
        self._hidden = torch.zeros(logits_graph.tokens if logits_graph else 0, model.hidden_size, dtype=dtype)

    @property
    def has_kv_cache(self) -> bool:
        """False before `allocate_kv_cache`, and after a step that failed half-way: then nothing can run any more."""
        return self._compiler is not None and not self._failed

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """A zeroed KV cache of NB = ``num_blocks`` blocks, the null block included."""
        layers = self._model.kv_layers
        shapes = layer_shapes(layers, num_blocks, self._config.block_size)
        self._kv_cache = self._route.allocate_kv_cache(shapes, cache_dtype(layers, self._dtype))
        self._compiler = GraphCompiler(self._model, self._config, self._route, self._cache, self._dtype, num_blocks)
        warning = fp8_cache_warning(kernels_of(self._config)) if self._config.fp8_kv_cache else None
        if warning is not None:
            logger.warning(warning)

    def warm_up(self, report: Report | None = None) -> None:
        """Make every graph of the list ready and run it once on padding only; afterwards no step compiles.

        In CPU mode only the smallest prefill and decode graph run of those that come from the cache: they show as well
        as the others, each of which may take seconds, that cache, weights and machine fit.

        Graphs that are not in the cache are compiled by this process one after the other, which costs least as long as
        each takes seconds. If the number of compile workers or the compile timeout is set, they are compiled first, in
        other processes; see `precompiled`.

        Args:
            report: is told of each graph; by default a progress bar on a terminal and log lines elsewhere.

        Raises:
            CompileForbiddenError: a graph is not in the cache and VLLM_NEURON_DISABLE_WARMUP_COMPILE is set.
            JobFailedError: a process could not compile a graph, or took too long.
        """
        start = time.monotonic()
        # After the KV cache, whose size follows from the memory that is free.
        room = host_memory_available() // (_PREPARED_FRACTION * self._config.tensor_parallel_size)
        self._prepared = prepare_weights(kernels_of(self._config), self._unprepared, room)
        self._unprepared = ()
        with (
            precompiled(self._graph_compiler, self.graphs, report) as compile_graph,
            warm_up_progress(len(self.graphs)) if report is None else nullcontext(report) as show,
        ):
            self._warm_up(compile_graph, show)
        logger.info(
            "Warm-up: %d graphs ready in %.1f s (%d from the cache, %d compiled)",
            len(self.graphs),
            time.monotonic() - start,
            self.statistics.cached,
            self.statistics.compiled,
        )

    def _warm_up(self, compile_graph: Compile, report: Report) -> None:
        for index, graph in enumerate(self.graphs, start=1):
            compiled = self._make_ready(graph, compile_graph)
            start = time.monotonic()
            if graph.kind == "prompt_logits":
                self._hidden_to_logits(graph)
            elif self._must_run(graph, compiled):
                self._submit(graph, ()).result()
            seconds = compiled.seconds + time.monotonic() - start
            self.statistics.seconds[graph.name] = seconds
            report(GraphReady(graph.name, index, len(self.graphs), seconds, compiled.source))

    def _must_run(self, graph: GraphSpec, compiled: CompiledGraph) -> bool:
        if not self._config.cpu_mode or compiled.source == "compiled":
            return True
        return graph == min((other for other in self.graphs if other.kind == graph.kind), key=_size)

    def run_prefill(self, row: Row) -> StepOutputs:
        """Compute many tokens of one request.

        Returns:
            logits [1, V] ([0, V] if the row wants none) and hidden [n, H] of the row's n tokens.
        """
        outputs = StepOutputs(*self._submit_counted(prefill_graph(self.graphs, len(row.token_ids)), (row,)).result())
        return StepOutputs(outputs.logits[: int(row.wants_logits)], outputs.hidden[: len(row.token_ids)])

    def run_decode(self, rows: Sequence[Row]) -> StepOutputs:
        """Compute one token of each of n requests.

        Returns:
            logits [n, V] (only the rows that want them, in order) and hidden [n, H].
        """
        outputs = StepOutputs(*self._submit_counted(self._decode_graph(rows), rows).result())
        logits = outputs.logits[: len(rows)]
        if not all(row.wants_logits for row in rows):
            logits = logits[[i for i, row in enumerate(rows) if row.wants_logits]]
        return StepOutputs(logits, outputs.hidden[: len(rows)])

    def run_layers(self, row: Row) -> LayerOutputs:
        """Compute many tokens of one request, as `run_prefill` does, and return what each layer leaves.

        Needs a "layers" graph, which only validation asks for.

        Returns:
            residuals L + 1 of [n, H], hidden [n, H] and logits [n, V] of the row's n tokens.
        """
        count = len(row.token_ids)
        outputs = LayerOutputs(*self._submit_counted(layers_graph(self.graphs, count), (row,)).result())
        return LayerOutputs(
            tuple(residual[:count] for residual in outputs.residuals), outputs.hidden[:count], outputs.logits[:count]
        )

    def submit_prefill(self, row: Row, *, logprobs: bool = True) -> SubmittedStep:
        """Compute many tokens of one request, and sample the one that follows them; see `submit_decode`."""
        graph = prefill_graph(self.graphs, len(row.token_ids))
        return SubmittedStep(1, self._submit_counted(graph, (row,), logprobs=logprobs))

    def submit_decode(
        self, rows: Sequence[Row], after: SubmittedStep | None = None, *, logprobs: bool = True
    ) -> SubmittedStep:
        """Compute one token of each of n requests, and sample the one that follows it.

        Args:
            rows: of the requests.
            after: the step that `fed_from` of the rows speaks of; it may still be under way.
            logprobs: whether anybody reads them, if the graph makes any.

        Raises:
            ValueError: a row takes its token from a step that is not given.
        """
        if after is None and any(row.fed_from != NOT_FED for row in rows):
            raise ValueError("A row takes its token from an earlier step, and none is given.")
        return SubmittedStep(len(rows), self._submit_counted(self._decode_graph(rows), rows, after, logprobs))

    def _decode_graph(self, rows: Sequence[Row]) -> GraphSpec:
        return decode_graph(self.graphs, len(rows), max(row.end for row in rows))

    def prompt_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] float32 of hidden states [n, H], as `run_prefill` returned them.

        Raises:
            RuntimeError: sampling is on the device, so that there is no graph for it.
        """
        graph = prompt_logits_graph(self.graphs)
        if graph is None:
            raise RuntimeError("There is no graph of prompt logits where sampling is on the device.")
        logits = torch.empty(len(hidden), self._model.vocab_size, dtype=torch.float32)
        for start in range(0, len(hidden), graph.tokens):
            piece = hidden[start : start + graph.tokens]
            self._hidden[: len(piece)] = piece
            self._hidden[len(piece) :] = 0
            logits[start : start + len(piece)] = self._hidden_to_logits(graph)[: len(piece)]
            self._count(graph, len(piece))
        return logits

    def _hidden_to_logits(self, graph: GraphSpec) -> torch.Tensor:
        executable = self._executable(graph)
        logits, self._no_kv_cache = self._queue.run(lambda: executable(self._weights, self._no_kv_cache, self._hidden))
        return logits

    def close(self) -> None:
        """Let go of the device."""
        self._queue.close()

    def _submit_counted(
        self, graph: GraphSpec, rows: Sequence[Row], after: SubmittedStep | None = None, logprobs: bool = True
    ) -> "Future[Any]":
        future = self._submit(graph, rows, after, logprobs)
        self._count(graph, sum(len(row.token_ids) for row in rows))
        return future

    def _count(self, graph: GraphSpec, live_rows: int) -> None:
        self.statistics.executions[graph.name] += 1
        self.statistics.live_rows[graph.name] += live_rows
        if self._on_step is not None:
            self._on_step(graph, live_rows)

    def _submit(
        self, graph: GraphSpec, rows: Sequence[Row], after: SubmittedStep | None = None, logprobs: bool = True
    ) -> "Future[Any]":
        """Prepare a step here and now, and let it run after those submitted before."""
        executable = self._executable(graph)
        inputs = self._free_builders()[graph].build(rows)

        def run() -> Any:
            fed = inputs
            if after is not None and isinstance(inputs, SampledInputs):
                fed = feed(inputs, after.sampled.result().token_ids)
            outputs = self._run(executable, fed)
            return outputs if logprobs or graph.sampling == "host" else Sampled(outputs.token_ids)

        future = self._queue.submit(run)
        self._latest.append(future)
        return future

    def _free_builders(self) -> dict[GraphSpec, InputBuilder | SampledInputBuilder]:
        """Those whose inputs no step reads any more; waits if there are none."""
        if len(self._latest) == len(self._builders):
            wait([self._latest[0]])
        self._builders.append(self._builders.pop(0))
        return self._builders[-1]

    def _run(self, executable: Executable, inputs: Any) -> Any:
        if self._kv_cache is None:
            raise RuntimeError(
                "There is no KV cache: it was never allocated, or a step that failed has taken it along."
            )
        # The executable takes the cache's memory over: from here on only what it returns is a KV cache.
        kv_cache, self._kv_cache = self._kv_cache, None
        try:
            outputs, self._kv_cache = executable(self._weights, kv_cache, inputs)
        except BaseException:
            self._failed = True
            raise
        return outputs

    def _executable(self, graph: GraphSpec) -> Executable:
        if graph not in self._executables:
            self._compile_late(graph)
        return self._executables[graph]

    @property
    def _graph_compiler(self) -> GraphCompiler:
        if self._compiler is None:
            raise RuntimeError("allocate_kv_cache must come before any graph is compiled: its size is part of a graph")
        return self._compiler

    def _make_ready(self, graph: GraphSpec, compile_graph: Compile) -> CompiledGraph:
        """Load or compile a graph, and count it."""
        compiled = compile_graph(graph)
        self._executables[graph] = compiled.executable
        if compiled.source == "compiled":
            self.statistics.compiled += 1
        else:
            self.statistics.cached += 1
        return compiled

    def _compile_late(self, graph: GraphSpec) -> None:
        """A step asks for a graph that no warm-up has made ready: count it, say it, and in strict mode refuse."""
        self.statistics.compiles_after_warmup += 1
        shape = f"{graph.name} ({graph.tokens} rows, {graph.requests} requests, context {graph.context})"
        if self._config.disable_warmup_compile:
            raise CompileForbiddenError(
                f"A step needs graph {shape}, which warm-up has not made ready, and "
                "VLLM_NEURON_DISABLE_WARMUP_COMPILE=1 forbids compiling while serving."
            )
        guide = "docs/troubleshooting.md#compilation-during-inference"
        logger.warning("Compiling %s while serving: warm-up has not made it ready. See %s.", shape, guide)
        self._make_ready(graph, self._graph_compiler.compile)


def _size(graph: GraphSpec) -> tuple[int, int]:
    return graph.tokens, graph.context
