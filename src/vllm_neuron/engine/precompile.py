"""Compiles ahead what the cache lacks, in processes of their own; then it is loaded from the cache like anything else.

This happens where NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS or NEURON_LIBTORCH_COMPILATION_TIMEOUT is set: a compile can
be bounded in time only where there is a process to kill. Where neither is set, each graph is compiled in turn by the
process that needs it, which is fastest as long as a compile is shorter than a process takes to import torch.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from vllm_neuron.compilation.cache import CacheFolders, CompileCache, Source
from vllm_neuron.compilation.pool import Job, JobDone, run_jobs
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.compiler import CompiledGraph, GraphCompiler, kernels_of
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.progress import GraphCompiled, Report, compile_progress
from vllm_neuron.kernels.dispatch import using
from vllm_neuron.models.model import Model
from vllm_neuron.routes.route import Route

logger = logging.getLogger(__name__)

LOADING_THREADS = 4
"""At most so many graphs are loaded at a time."""

Compile = Callable[[GraphSpec], CompiledGraph]
"""Loads or compiles a graph."""


@dataclass(frozen=True)
class CompileRequest:
    """All that another process needs to compile a graph; it can be pickled.

    Attributes:
        model: what to compile.
        config: the resolved configuration.
        route: how to compile it. It holds nothing but what it compiles for; sent as it is, its modules are imported
            before the time of a compile begins.
        dtype: of weights and activations, and of a KV cache that has none of its own.
        num_blocks: NB, blocks of the KV cache.
        folders: the cache that takes the result.
        graph: which of its graphs.
    """

    model: Model
    config: ResolvedConfig
    route: Route
    dtype: torch.dtype
    num_blocks: int
    folders: CacheFolders
    graph: GraphSpec


@dataclass(frozen=True)
class CompileResult:
    """What became of a request; the executable itself is in the cache.

    Attributes:
        source: "compiled", or the tier of the cache that another process put it into meanwhile.
        seconds: time it took.
        warnings: what was logged as WARNING or worse.
    """

    source: Source
    seconds: float
    warnings: tuple[str, ...]


def compile_into_cache(request: CompileRequest) -> CompileResult:
    """Compile a graph, by itself and for a process that will load it from the cache."""
    start = time.monotonic()
    cache = CompileCache(request.folders, request.route.name)
    compiler = GraphCompiler(request.model, request.config, request.route, cache, request.dtype, request.num_blocks)
    with _warnings_noted() as warnings:
        compiled = compiler.compile(request.graph)
    return CompileResult(compiled.source, time.monotonic() - start, tuple(warnings))


@contextmanager
def precompiled(
    compiler: GraphCompiler, graphs: Sequence[GraphSpec], report: Report | None = None
) -> Iterator[Compile]:
    """Compile ahead, if the configuration asks for it, those graphs that the cache lacks.

    Args:
        compiler: of these graphs.
        graphs: all that will be asked for, in the order in which they are to be compiled.
        report: is told of each graph that is compiled ahead; by default a progress bar on a terminal and log lines
            elsewhere.

    Yields:
        A function that gives each graph, to be called within the block. A graph that was compiled ahead counts as
        compiled, and its seconds are those of compiling and loading together. The function raises CompileForbiddenError
        for a graph that is not in the cache if VLLM_NEURON_DISABLE_WARMUP_COMPILE is set.

    Raises:
        JobFailedError: a graph could not be compiled, or took too long. Those that were compiled before are in the
            cache, so that the next start goes on from there.
    """
    config = compiler.config
    may_compile = not config.disable_warmup_compile

    def in_turn(graph: GraphSpec) -> CompiledGraph:
        return compiler.compile(graph, may_compile)

    asked_for = config.compile_workers is not None or config.compile_timeout is not None
    missing = [graph for graph in graphs if not compiler.is_cached(graph)] if asked_for and may_compile else []
    if not missing:
        with _loading(compiler, graphs) as load:
            yield lambda graph: load(graph) or in_turn(graph)
        return
    with _place(compiler) as (folders, logs):
        results = _compile_in_processes(compiler, missing, folders, logs, report)
        cache = CompileCache(folders, compiler.route.name)
        loader = GraphCompiler(compiler.model, config, compiler.route, cache, compiler.dtype, compiler.num_blocks)

        def load(graph: GraphSpec) -> CompiledGraph:
            ahead = results.get(graph.name)
            if ahead is None:
                return in_turn(graph)
            loaded = loader.compile(graph)
            source: Source = "compiled" if "compiled" in (ahead.source, loaded.source) else ahead.source
            return replace(loaded, source=source, seconds=ahead.seconds + loaded.seconds)

        yield load


def _compile_in_processes(
    compiler: GraphCompiler, graphs: Sequence[GraphSpec], folders: CacheFolders, logs: Path, report: Report | None
) -> dict[str, CompileResult]:
    config, route = compiler.config, compiler.route
    request = partial(CompileRequest, compiler.model, config, route, compiler.dtype, compiler.num_blocks, folders)
    jobs = [Job(graph.name, compile_into_cache, request(graph)) for graph in graphs]
    workers = min(config.compile_workers or 1, len(jobs))
    names = ", ".join(job.name for job in jobs)
    logger.info("Compiling %d graphs in %d processes, largest first: %s", len(jobs), workers, names)
    warned: set[str] = set()
    progress = compile_progress(len(jobs)) if report is None else nullcontext(report)
    # Kernels that have to be built first are built here: once, and not in the time of a graph.
    kernels = kernels_of(config)
    with using(*kernels.sets, options=kernels.options), progress as show:

        def tell(done: JobDone) -> None:
            result: CompileResult = done.result
            for text in result.warnings:
                if text not in warned:
                    warned.add(text)
                    logger.warning("%s", text)
            show(GraphCompiled(done.name, done.index, done.total, result.seconds, result.source))

        return run_jobs(jobs, workers, config.compile_timeout, logs, tell)


@contextmanager
def _loading(
    compiler: GraphCompiler, graphs: Sequence[GraphSpec]
) -> Iterator[Callable[[GraphSpec], CompiledGraph | None]]:
    """Load from the cache, by several threads, what it has of the graphs: for XLA that is half of a warm start's time.

    Yields:
        A function that waits for a graph, and returns None if it is to be compiled.
    """
    pool = ThreadPoolExecutor(LOADING_THREADS, "load-graphs")
    try:
        loading = {graph: pool.submit(compiler.load, graph) for graph in graphs}
        yield lambda graph: loading[graph].result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _place(compiler: GraphCompiler) -> Iterator[tuple[CacheFolders, Path]]:
    """The cache through which other processes hand over what they compile, and a folder for their logs.

    Where the local tier is not used, or cannot be written to, a folder takes its place that is removed at the end. The
    log of a failure stays.
    """
    folders = compiler.cache.folders
    local = folders.local / compiler.route.name if folders.local is not None else None
    if local is not None and _is_writable(local):
        yield folders, local / "logs"
        return
    place = Path(tempfile.mkdtemp(prefix="vllm-neuron-compile-"))
    try:
        yield replace(folders, local=place / "cache"), place / "logs"
    finally:
        shutil.rmtree(place / "cache", ignore_errors=True)
        for folder in (place / "logs", place):
            with suppress(OSError):
                folder.rmdir()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        logger.warning(
            "Compile cache (local) %s cannot be written to (%s). Graphs that are not in it are compiled at every "
            "start; set VLLM_CACHE_ROOT to a folder that this user can write to.",
            folder,
            error,
        )
        return False


@contextmanager
def _warnings_noted() -> Iterator[list[str]]:
    """What is logged inside the block as WARNING or worse: the log of a process is thrown away if all goes well."""
    noted: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            noted.append(record.getMessage())

    ours, handler = logging.getLogger("vllm_neuron"), Noting(logging.WARNING)
    ours.addHandler(handler)
    try:
        yield noted
    finally:
        ours.removeHandler(handler)
