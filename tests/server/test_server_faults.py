"""Faults from outside: each ends in an error that names it, or is recovered from, and leaves nothing behind.

Kills of the engine and of the API server, SIGTERM under load: test_server_lifecycle.py. A full disk:
test_mounted_caches.py and test_metrics_folder.py. Checkpoints that are unreadable or truncated: test_loading.py.
"""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.caches import new_cache
from tests.checkpoints import greedy_oracle, prompt, tokenizer, write_checkpoint
from tests.server.completions import assert_next_is_right, complete, token_ids
from tests.server.harness import MODEL_NAME, TINY_ARGS, Server, launch, run_to_end, serving, wait_until
from vllm_neuron.plugin.metrics_folder import PREFIX

CLOCK = """
import os, time

real = time.time
clock = os.environ["CLOCK_FILE"]
time.time = lambda: real() + os.stat(clock).st_size * (1 if os.access(clock, os.X_OK) else -1)
"""
"""sitecustomize.py of every process of a server: the clock is off by as many seconds as a file has bytes, forward if it
is executable, else back."""

FEW_BLOCKS = 20
"""The null block, and one request of full length with three blocks to spare."""
DAY = 86400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def clock(folder: Path) -> Path:
    file = folder / "clock"
    file.touch()
    return file


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """Its tokenizer knows 88 tokens more than it does."""
    model = write_checkpoint(folder / "model")
    tokenizer(600).save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def server(model: Path, cache: Path, folder: Path, clock: Path) -> Iterator[Server]:
    """One whose worker has a process of its own, as with tensor parallelism, and that has few blocks."""
    (folder / "sitecustomize.py").write_text(CLOCK)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "CLOCK_FILE": str(clock), "TMPDIR": str(folder)}
    args = (*TINY_ARGS, "--num-gpu-blocks-override", str(FEW_BLOCKS), "--distributed-executor-backend", "mp")
    with serving(model, "neuron_native", folder, cache, args, env=env) as running:
        yield running


def test_server_whose_kv_cache_is_full_lets_requests_wait(server: Server, model: Path) -> None:
    """Two of the four fit while they are prompts, and not any more when they are 289 tokens long."""
    prompts = [prompt(250, seed=i) for i in range(4)]
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = server.client.completions.create(
        model=MODEL_NAME, prompt=prompts, max_tokens=42, temperature=0, extra_body=extra
    )
    found = [list(choice.token_ids) for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    assert found == [greedy_oracle(model, ids, 42) for ids in prompts]
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:num_preemptions_total") > 0


@pytest.mark.parametrize("days", [1, -2])
def test_server_whose_clock_jumps_in_a_request_goes_on(server: Server, model: Path, clock: Path, days: int) -> None:
    ids = prompt(30, seed=days + 10)
    expected = token_ids(server, ids, 300)
    stream = complete(server, ids, 300, stream=True)
    found = list(next(stream).choices[0].token_ids)
    clock.chmod(0o700 if days > 0 else 0o600)
    os.truncate(clock, abs(days) * DAY)
    assert found + [token_id for chunk in stream for token_id in chunk.choices[0].token_ids or ()] == expected
    assert_next_is_right(server, model)


def test_server_whose_tokenizer_is_another_models_refuses_what_it_has_no_embedding_for(
    server: Server, model: Path
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"Token id 550.*ids are 0 to 511.*tokenizer is another model's"):
        token_ids(server, [5, 550], 4)
    chosen = server.client.completions.create(
        model=MODEL_NAME, prompt="ab", max_tokens=8, extra_body={"structured_outputs": {"choice": ["xy", "no"]}}
    )
    assert chosen.choices[0].text in ("xy", "no")
    assert_next_is_right(server, model)


def test_server_whose_worker_is_killed_ends_and_leaves_nothing(server: Server, folder: Path) -> None:
    """The last test of this server. Nobody but the API server keeps its port."""
    (worker,) = [process for process in server.processes() if "Worker" in process.name()]
    for process in server.processes():
        listening = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert (server.port in listening) == (process.pid == server.process.pid), process
    lines_before = len(server.text().splitlines())
    stream = complete(server, prompt(20), 480, stream=True)
    next(stream)
    worker.kill()  # At once: such a small model has said all of it in half a second.
    wait_until(lambda: server.health() != 200, 5, "/health other than 200", server)
    received = 1
    with suppress(openai.APIError, httpx.HTTPError):
        for _ in stream:
            received += 1
    assert received < 480
    server.assert_gone(10)
    lines = server.text().splitlines()[lines_before:]
    first = next(i for i, line in enumerate(lines) if "Worker proc VllmWorker-0 died unexpectedly" in line)
    assert not any("Traceback" in line for line in lines[:first])
    assert list(folder.glob(f"{PREFIX}*")) == []


def test_server_told_to_stop_in_warm_up_stops(tiny: Path, tmp_path: Path, short_path: Path) -> None:
    server = launch(tiny, "neuron_native", tmp_path, new_cache(tmp_path / "cache"), env={"TMPDIR": str(short_path)})
    try:
        server.wait_for_log("Graph 1 of ")
        server.process.send_signal(signal.SIGTERM)
        server.assert_gone(10)
        assert "Application startup complete" not in server.text()
    finally:
        server.kill_all()
    assert list(short_path.glob(f"{PREFIX}*")) == []


def test_server_refuses_a_port_that_another_listens_on(tiny: Path, cache: Path, tmp_path: Path) -> None:
    """Another that shares its port, as servers of vLLM do; with any other process vLLM's own `bind` fails."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, text = run_to_end(tiny, "neuron_native", tmp_path, cache, port=port)
    assert code not in (0, None)
    last = text.splitlines()[-1]
    assert f"--port={port}: process {os.getpid()} listens" in last, last
    assert "EngineCore" not in text


def test_server_refuses_weights_that_are_not_numbers(tiny: Path, cache: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    code, text = run_to_end(model, "neuron_native", tmp_path, cache)
    assert code not in (0, None)
    lines = text.splitlines()
    assert "The engine has ended: CheckpointError" in lines[-1], lines[-1]
    assert "down_proj" in lines[-1] and "NaN" in lines[-1]
    assert "Graph 1 of" not in text
