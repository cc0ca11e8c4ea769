"""Servers that are stopped, killed or frozen leave nothing behind, and say so on /health."""

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import prompt
from tests.server.completions import assert_next_is_right, token_ids
from tests.server.harness import BACKENDS, MODEL_NAME, Server, http, launch, serving, wait_until

GONE_SECONDS = 10


def busy(server: Server) -> bool:
    return server.metric("vllm:num_requests_running") > 0


def failed(answer: tuple[int, Any]) -> bool:
    """No answer, or an error. vLLM reports the death of its engine in the body of a response of status 200."""
    status, body = answer
    return status != 200 or "error" in body


def start_decoding(server: Server, pool: ThreadPoolExecutor) -> "Future[tuple[int, Any]]":
    body = {"model": MODEL_NAME, "prompt": prompt(20), "max_tokens": 480, "ignore_eos": True, "temperature": 0}
    pending = pool.submit(http, "POST", f"{server.url}/v1/completions", body)
    wait_until(lambda: busy(server), 20, "running request", server)
    return pending


def test_server_sigterm_ends_everything_while_it_decodes(backend: str, tiny: Path, cache: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, serving(tiny, backend, tmp_path, cache) as server:
        pending = start_decoding(server, pool)
        server.stop(GONE_SECONDS)
        assert failed(pending.result(5))


@pytest.mark.parametrize(("backend", "victim"), [*zip(BACKENDS, ["engine", "api server"], strict=True)])
def test_server_killed_while_it_decodes(backend: str, victim: str, tiny: Path, cache: Path, tmp_path: Path) -> None:
    """kill -9: no process after ten seconds, and a restart finds every graph in the cache and no lock held."""
    server = launch(tiny, backend, tmp_path, cache)
    try:
        server.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            pending = start_decoding(server, pool)
            if victim == "api server":
                server.process.kill()
            else:
                server.engine_core().kill()
                wait_until(lambda: server.health() != 200, 5, "/health other than 200", server)
                begin = time.monotonic()
                answer = http("POST", f"{server.url}/v1/completions", {"model": MODEL_NAME, "prompt": [5]}, 10)
                assert failed(answer), answer
                assert time.monotonic() - begin < 5
            assert failed(pending.result(10))
        server.assert_gone(GONE_SECONDS)
    finally:
        server.kill_all()
    with serving(tiny, backend, tmp_path, cache, env={"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}) as again:
        assert again.rpc("graph_statistics")["compiled"] == 0
        assert_next_is_right(again, tiny)


@pytest.mark.parametrize(("backend", "victim"), [*zip(BACKENDS, ["api server", "engine"], strict=True)])
def test_server_killed_while_it_compiles(backend: str, victim: str, tiny: Path, tmp_path: Path) -> None:
    """A cold cache of its own: the kill comes while something is compiled, and the next start makes the rest."""
    compiling = {"neuron_native": "Building the CPU kernels", "vllm_neuron": "Graph 1 of "}[backend]
    own_cache = tmp_path / "cache"
    server = launch(tiny, backend, tmp_path, own_cache)
    try:
        server.wait_for_log(compiling)
        assert server.health() != 200
        (server.process if victim == "api server" else server.engine_core()).kill()
        server.assert_gone(GONE_SECONDS)
    finally:
        server.kill_all()
    with serving(tiny, backend, tmp_path, own_cache) as again:
        counters = again.rpc("graph_statistics")
        assert counters["compiled"] >= 1
        assert counters["compiled"] + counters["cached"] == len(counters["seconds"])
        assert_next_is_right(again, tiny)


def test_server_killed_while_it_loads(tiny: Path, cache: Path, tmp_path: Path) -> None:
    """Before any graph: as soon as the engine process exists."""
    server = launch(tiny, "neuron_native", tmp_path, cache)
    try:
        wait_until(lambda: any("EngineCor" in p.name() for p in server.processes()), 120, "engine process", server)
        server.process.kill()
        server.assert_gone(GONE_SECONDS)
    finally:
        server.kill_all()


def test_server_frozen_engine_recovers(server: Server, tiny: Path) -> None:
    engine = server.engine_core()
    engine.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(token_ids, server, prompt(20, seed=4), 8)
            time.sleep(5)
            assert not pending.done()
            engine.send_signal(signal.SIGCONT)
            assert len(pending.result(30)) == 8
    finally:
        engine.send_signal(signal.SIGCONT)
    assert_next_is_right(server, tiny)
