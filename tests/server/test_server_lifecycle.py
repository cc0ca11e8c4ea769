"""Servers that are stopped or killed leave nothing behind, and say so on /health."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.caches import new_cache
from tests.checkpoints import prompt
from tests.server.completions import assert_next_is_right
from tests.server.harness import BACKENDS, MODEL_NAME, Server, http, launch, serving, wait_until
from tests.server.stand_in_compiler import StandInCompiler

GONE_SECONDS = 10


def busy(server: Server) -> bool:
    return server.metric("vllm:num_requests_running") > 0


def failed(answer: tuple[int, Any]) -> bool:
    """No answer, or an error. vLLM reports the death of its engine in the body of a response of status 200."""
    status, body = answer
    return status != 200 or "error" in body


def start_decoding(server: Server, pool: ThreadPoolExecutor) -> "Future[tuple[int, Any]]":
    """One request of many prompts: it is still running when a busy machine comes to what is to happen meanwhile."""
    prompts = [prompt(20, seed=seed) for seed in range(32)]
    body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 480, "ignore_eos": True, "temperature": 0}
    pending = pool.submit(http, "POST", f"{server.url}/v1/completions", body)
    wait_until(lambda: busy(server), 20, "running request", server)
    return pending


def kill(server: Server, victim: str) -> None:
    (server.process if victim == "api server" else server.engine_core()).kill()


@pytest.mark.parametrize(
    ("backend", "compiling", "while_it_compiles", "while_it_decodes"),
    [
        ("neuron_native", "Building the CPU kernels", "api server", "engine"),
        ("vllm_neuron", "Graph 1 of ", "engine", "api server"),
    ],
    ids=BACKENDS,
)
def test_server_killed_while_it_compiles_then_while_it_decodes_then_told_to_stop(
    backend: str,
    compiling: str,
    while_it_compiles: str,
    while_it_decodes: str,
    tiny: Path,
    tmp_path: Path,
) -> None:
    """Three starts on one cache, cold at first. After each end no process is left, and the next start is right.

    kill -9 of one process while kernels or graphs are compiled: the next start makes the rest. kill -9 of the other
    while it decodes: the next start finds every graph, and no lock held. SIGTERM while it decodes.
    """
    cache = new_cache(tmp_path / "cache")
    compiler = StandInCompiler(tmp_path / "bin", cache)
    if "kernels" in compiling:
        compiler.held.touch()
    server = launch(tiny, backend, tmp_path, cache, env=compiler.env)
    try:
        server.wait_for_log(compiling)
        assert server.health() != 200
        kill(server, while_it_compiles)
        server.assert_gone(GONE_SECONDS)
    finally:
        server.kill_all()

    compiler.held.unlink(missing_ok=True)
    server = launch(tiny, backend, tmp_path, cache, env=compiler.env)
    try:
        server.wait_ready()
        counters = server.rpc("graph_statistics")
        assert counters["compiled"] >= 1
        assert counters["compiled"] + counters["cached"] == len(counters["seconds"])
        assert_next_is_right(server, tiny)
        with ThreadPoolExecutor(1) as pool:
            pending = start_decoding(server, pool)
            kill(server, while_it_decodes)
            if while_it_decodes == "engine":
                wait_until(lambda: server.health() != 200, 5, "/health other than 200", server)
                begin = time.monotonic()
                answer = http("POST", f"{server.url}/v1/completions", {"model": MODEL_NAME, "prompt": [5]}, 10)
                assert failed(answer), answer
                assert time.monotonic() - begin < 5
            assert failed(pending.result(10))
        server.assert_gone(GONE_SECONDS)
    finally:
        server.kill_all()

    strict = {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
    with ThreadPoolExecutor(1) as pool, serving(tiny, backend, tmp_path, cache, env=strict) as again:
        assert again.rpc("graph_statistics")["compiled"] == 0
        assert_next_is_right(again, tiny)
        pending = start_decoding(again, pool)
        again.stop(GONE_SECONDS)
        assert failed(pending.result(5))


def test_server_killed_while_it_loads(tiny: Path, cache: Path, tmp_path: Path) -> None:
    """Before any graph: as soon as the engine process exists."""
    server = launch(tiny, "neuron_native", tmp_path, cache)
    try:
        wait_until(lambda: any("EngineCor" in p.name() for p in server.processes()), 120, "engine process", server)
        server.process.kill()
        server.assert_gone(GONE_SECONDS)
    finally:
        server.kill_all()
