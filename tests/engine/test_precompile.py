"""Compiling ahead in other processes: what is compiled, what a failure leaves, and what the executor makes of it."""

import logging
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.fixtures import NUM_BLOCKS, SMALL, random_weights, tiny_model
from tests.engine.test_executor import PROMPT, row
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.compilation.pool import Job, JobDone, JobFailedError
from vllm_neuron.compilation.store import EntryStore
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine import precompile
from vllm_neuron.engine.compiler import CompileForbiddenError, GraphCompiler
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.graphs import list_graphs
from vllm_neuron.engine.precompile import CompileRequest, CompileResult, compile_into_cache, precompiled
from vllm_neuron.engine.progress import GraphCompiled, GraphReady
from vllm_neuron.envs import BACKENDS
from vllm_neuron.routes.native import NativeLowered, NativeRoute
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route

MODEL = tiny_model(num_hidden_layers=1)
PARALLEL = replace(SMALL, num_seqs_buckets=(1, 2), compile_workers=2)
NAMES = ["prefill_t32_ctx256", "decode_b2_ctx256", "decode_b1_ctx256", "prompt_logits_t32"]


class Start:
    """An executor that has been warmed up, and what it reported."""

    def __init__(self, folders: CacheFolders, config: ResolvedConfig = PARALLEL) -> None:
        route = NativeRoute(CPU)
        cache = CompileCache(folders, route.name)
        self.executor = GraphExecutor(MODEL, config, route, cache, random_weights(MODEL), torch.float32)
        self.executor.allocate_kv_cache(NUM_BLOCKS)
        events: list[GraphCompiled | GraphReady] = []
        self.executor.warm_up(events.append)
        self.compiled = [event for event in events if isinstance(event, GraphCompiled)]
        self.ready = [event for event in events if isinstance(event, GraphReady)]
        assert events == [*self.compiled, *self.ready]

    @property
    def counts(self) -> tuple[int, int]:
        return self.executor.statistics.compiled, self.executor.statistics.cached

    def logits(self) -> torch.Tensor:
        return self.executor.run_prefill(row(PROMPT[:20], 0)).logits.clone()


def store(root: Path) -> EntryStore:
    return EntryStore(root / "neuron_native")


def whole_entries(root: Path) -> set[str]:
    """Names of the graphs in a cache, each of which is complete."""
    found = list(store(root).entries())
    assert all(entry.manifest is not None and store(root).read(entry.manifest.key) is not None for entry in found)
    return {entry.manifest.graph for entry in found if entry.manifest is not None}


def request(root: Path, graph: int = 0) -> CompileRequest:
    folders, spec = CacheFolders(root), list_graphs(PARALLEL)[graph]
    return CompileRequest(MODEL, PARALLEL, NativeRoute(CPU), torch.float32, NUM_BLOCKS, folders, spec)


def compiler_of(root: Path | None, config: ResolvedConfig = PARALLEL) -> GraphCompiler:
    route = NativeRoute(CPU)
    return GraphCompiler(MODEL, config, route, CompileCache(CacheFolders(root), route.name), torch.float32, NUM_BLOCKS)


class PoolHere:
    """Stands in for the pool: runs the jobs in this process, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int, float | None]] = []
        self.logs: list[Path] = []

    def __call__(
        self,
        jobs: Sequence[Job],
        workers: int,
        timeout: float | None,
        log_folder: Path,
        report: Callable[[JobDone], None],
    ) -> dict[str, Any]:
        self.calls.append(([job.name for job in jobs], workers, timeout))
        self.logs.append(log_folder)
        results = {}
        for index, job in enumerate(jobs, start=1):
            results[job.name] = job.function(pickle.loads(pickle.dumps(job.argument)))
            report(JobDone(job.name, index, len(jobs), results[job.name]))
        return results


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> PoolHere:
    stand_in = PoolHere()
    monkeypatch.setattr(precompile, "run_jobs", stand_in)
    return stand_in


def test_processes_compile_everything_and_the_executor_loads_it(tmp_path: Path) -> None:
    first = Start(CacheFolders(tmp_path))
    assert {event.name for event in first.compiled} == set(NAMES)
    assert [(event.index, event.total) for event in first.compiled] == [(i, 4) for i in (1, 2, 3, 4)]
    assert str(first.compiled[2]).startswith(f"Compiled 3 of 4: {first.compiled[2].name} in ")
    assert [event.name for event in first.ready] == NAMES
    assert all(str(event).endswith("(compiled)") for event in first.ready)
    seconds = {event.name: event.seconds for event in first.compiled}
    assert all(event.seconds > seconds[event.name] > 0 for event in first.ready)
    assert first.counts == (4, 0)
    assert whole_entries(tmp_path) == set(NAMES)
    assert list((store(tmp_path).folder / "logs").iterdir()) == []

    second = Start(CacheFolders(tmp_path))
    assert (second.compiled, second.counts) == ([], (0, 4))
    alone = Start(CacheFolders(), replace(PARALLEL, compile_workers=None))
    assert torch.equal(first.logits(), alone.logits())


def compile_with_a_fault(request: CompileRequest) -> CompileResult:
    """In a process of the pool: the third compile of all goes wrong, with the cache's lock held."""
    compile_ = NativeLowered.compile

    def compile_or_fail(lowered: NativeLowered) -> Any:
        with open(os.environ["TEST_COMPILES"], "ab", buffering=0) as counter:
            counter.write(b"x")
            third = counter.tell() == 3
        if third:
            print("stand-in compiler: internal error")
            FAULTS[os.environ["TEST_FAULT"]]()
        return compile_(lowered)

    NativeLowered.compile = compile_or_fail  # type: ignore[method-assign]
    try:
        return compile_into_cache(request)
    finally:
        NativeLowered.compile = compile_  # type: ignore[method-assign]


def _raise() -> None:
    raise RuntimeError("neuronx-cc ended with exit code 70")


FAULTS: dict[str, Callable[[], None]] = {
    "raises": _raise,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1000),
}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raises", "RuntimeError: neuronx-cc ended with exit code 70"),
        ("killed", "its process was killed by signal 9"),
        ("hangs", "took longer than NEURON_LIBTORCH_COMPILATION_TIMEOUT=10 s"),
    ],
)
def test_failure_is_told_first_and_the_next_start_compiles_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, cause: str
) -> None:
    monkeypatch.setenv("TEST_COMPILES", str(tmp_path / "compiles"))
    monkeypatch.setenv("TEST_FAULT", fault)
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(precompile, "compile_into_cache", compile_with_a_fault)
        with pytest.raises(JobFailedError) as caught:
            Start(CacheFolders(cache), replace(PARALLEL, compile_timeout=10 if fault == "hangs" else None))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"Compiling {caught.value.name} failed: {cause}")
    assert str(caught.value.log) in lines[0]
    assert lines[1:] == ["  stand-in compiler: internal error"]
    assert caught.value.log.parent == store(cache).folder / "logs"
    assert caught.value.name in NAMES

    kept = whole_entries(cache)
    assert 1 <= len(kept) <= 3
    assert caught.value.name not in kept
    assert not list(store(cache).folder.glob(".*"))
    again = Start(CacheFolders(cache), replace(PARALLEL, compile_workers=None))
    assert again.counts == (4 - len(kept), len(kept))
    assert {event.name for event in again.ready if event.source == "compiled"} == set(NAMES) - kept


def test_only_what_is_missing_is_compiled_ahead_largest_first(tmp_path: Path, pool: PoolHere) -> None:
    Start(CacheFolders(tmp_path))
    missing = {"decode_b1_ctx256": "gone", "decode_b2_ctx256": "cut"}
    for entry in list(store(tmp_path).entries()):
        assert entry.manifest is not None
        match missing.get(entry.manifest.graph):
            case "gone":
                store(tmp_path).remove(entry.manifest.key)
            case "cut":
                os.truncate(entry.path / "blob", 10)
    second = Start(CacheFolders(tmp_path))
    assert pool.calls == [(NAMES, 2, None), (["decode_b2_ctx256", "decode_b1_ctx256"], 2, None)]
    assert second.counts == (2, 2)
    assert [event.source for event in second.ready] == ["local", "compiled", "compiled", "local"]


@pytest.mark.parametrize(
    ("workers", "timeout", "expected"), [(None, 30, (1, 30)), (3, None, (3, None)), (64, 30, (4, 30))]
)
def test_either_variable_asks_for_processes(
    tmp_path: Path, pool: PoolHere, workers: int | None, timeout: int | None, expected: tuple[int, int | None]
) -> None:
    Start(CacheFolders(tmp_path), replace(PARALLEL, compile_workers=workers, compile_timeout=timeout))
    assert [call[1:] for call in pool.calls] == [expected]


def test_without_them_everything_is_compiled_in_turn_here(tmp_path: Path, pool: PoolHere) -> None:
    started = Start(CacheFolders(tmp_path), replace(PARALLEL, compile_workers=None))
    assert (pool.calls, started.compiled, started.counts) == ([], [], (4, 0))


def test_nothing_is_compiled_ahead_where_compiling_is_forbidden(tmp_path: Path, pool: PoolHere) -> None:
    strict = replace(PARALLEL, disable_warmup_compile=True)
    with pytest.raises(CompileForbiddenError, match="Graph prefill_t32_ctx256 "):
        Start(CacheFolders(tmp_path), strict)
    assert pool.calls == []
    Start(CacheFolders(tmp_path))
    assert Start(CacheFolders(tmp_path), strict).counts == (0, 4)


def test_disabled_cache_is_replaced_by_a_folder_for_the_start(
    tmp_path: Path, pool: PoolHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        assert Start(CacheFolders(), replace(PARALLEL, disable_compile_cache=True)).counts == (4, 0)
    assert [len(names) for names, *_ in pool.calls] == [4, 4]
    assert list(tmp_path.iterdir()) == []


def test_log_of_a_failure_stays_where_the_cache_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(jobs: Sequence[Job], workers: int, timeout: float | None, log_folder: Path, report: object) -> None:
        log_folder.mkdir(parents=True)
        (log_folder / "decode.log").write_text("error\n")
        assert isinstance(jobs[0].argument, CompileRequest)
        compile_into_cache(jobs[0].argument)
        raise JobFailedError("decode", "exit code 70", log_folder / "decode.log")

    monkeypatch.setattr(precompile, "run_jobs", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(JobFailedError) as caught:
        Start(CacheFolders())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [caught.value.log]


def test_cache_that_cannot_be_written_to_is_named_and_replaced_for_the_start(
    tmp_path: Path, pool: PoolHere, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        started = Start(CacheFolders(tmp_path / "file" / "cache"))
    assert started.counts == (4, 0)
    assert "set VLLM_CACHE_ROOT to a folder that this user can write to" in caplog.text
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_warnings_of_other_processes_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warn(jobs: Sequence[Job], *arguments: Any) -> dict[str, CompileResult]:
        results = {job.name: CompileResult("compiled", 1.0, ("the disk is full",)) for job in jobs}
        for index, job in enumerate(jobs, start=1):
            arguments[-1](JobDone(job.name, index, len(jobs), results[job.name]))
        return results

    monkeypatch.setattr(precompile, "run_jobs", warn)
    with caplog.at_level(logging.WARNING):
        started = Start(CacheFolders(tmp_path))
    assert [record.getMessage() for record in caplog.records].count("the disk is full") == 1
    # What the others could not keep is compiled here.
    assert started.counts == (4, 0)


def test_request_is_compiled_into_the_cache_once(tmp_path: Path) -> None:
    first, second = compile_into_cache(request(tmp_path)), compile_into_cache(request(tmp_path))
    assert (first.source, second.source) == ("compiled", "local")
    assert first.seconds > 0
    assert whole_entries(tmp_path) == {NAMES[0]}


def test_request_tells_its_warnings(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = CacheFolders(tmp_path, remote=tmp_path / "file" / "remote")
    handlers = list(logging.getLogger("vllm_neuron").handlers)
    result = compile_into_cache(replace(request(tmp_path), folders=folders))
    assert len(result.warnings) == 1
    assert "NEURON_LIBTORCH_REMOTE_CACHE" in result.warnings[0]
    assert logging.getLogger("vllm_neuron").handlers == handlers


def test_graph_that_another_process_compiled_meanwhile_counts_as_cached(tmp_path: Path, pool: PoolHere) -> None:
    compiler = compiler_of(tmp_path)
    graphs = list_graphs(PARALLEL)
    is_cached = compiler.is_cached

    def look_too_early(graph: Any) -> bool:
        found = is_cached(graph)
        compile_into_cache(replace(request(tmp_path), graph=graph))
        return found

    compiler.is_cached = look_too_early  # type: ignore[method-assign]
    events: list[Any] = []
    with precompiled(compiler, graphs, events.append) as compile_graph:
        assert [compile_graph(graph).source for graph in graphs] == ["local"] * 4
    assert [str(event).endswith("(local cache hit)") for event in events] == [True] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_routes_can_be_sent_to_other_processes(backend: str) -> None:
    route = pickle.loads(pickle.dumps(select_route(backend, CPU)))
    assert (route.name, route.target) == (backend, CPU)


def test_is_cached_needs_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_into_cache(request(tmp_path))
    compiler = compiler_of(tmp_path)
    monkeypatch.setattr(NativeRoute, "trace", None)
    assert [compiler.is_cached(graph) for graph in list_graphs(PARALLEL)] == [True, False, False, False]
    assert not compiler_of(None).is_cached(list_graphs(PARALLEL)[0])
