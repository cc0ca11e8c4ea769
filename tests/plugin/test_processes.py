import multiprocessing
import os
import socket
import subprocess
import sys
import types
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from vllm_neuron.plugin.processes import START_METHOD, choose_start_method, settle_engine_process


def run_vllm(monkeypatch: pytest.MonkeyPatch, command: str | None) -> None:
    """Make this process look like `vllm COMMAND`, or like a user's own program."""
    monkeypatch.delitem(sys.modules, "vllm.entrypoints.cli", raising=False)
    monkeypatch.setattr(sys, "argv", ["vllm", command, "model"] if command else ["program.py"])
    if command:
        monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli", types.ModuleType("cli"))


@pytest.mark.parametrize(
    ("cpu_mode", "command", "method"),
    [(True, "serve", "fork"), (True, "bench", "spawn"), (True, None, "spawn"), (False, "serve", "spawn")],
)
def test_only_vllm_serve_in_cpu_mode_forks(
    cpu_mode: bool, command: str | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(START_METHOD, "")
    monkeypatch.delenv(START_METHOD)
    run_vllm(monkeypatch, command)
    choose_start_method(cpu_mode)
    assert os.environ[START_METHOD] == method


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_users_start_method_is_kept(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_METHOD, method)
    run_vllm(monkeypatch, "serve")
    choose_start_method(cpu_mode=True)
    assert os.environ[START_METHOD] == method


def _engine(pipe: Connection, inherited: int) -> None:
    own = socket.create_server(("127.0.0.1", 0))
    settle_engine_process()
    pipe.send((os.readlink(f"/proc/self/fd/{inherited}"), own.getsockname()[1]))
    pipe.recv()


@pytest.mark.parametrize("listening", [True, False])
def test_forked_engine_gives_up_the_sockets_of_its_parent_alone(listening: bool) -> None:
    ours, theirs = multiprocessing.Pipe()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    if listening:
        listener.listen()
    port = listener.getsockname()[1]
    engine = multiprocessing.get_context("fork").Process(target=_engine, args=(theirs, listener.fileno()))
    engine.start()
    try:
        inherited, own_port = ours.recv()
        assert inherited == os.devnull
        socket.create_connection(("127.0.0.1", own_port), timeout=5).close()
        listener.close()
        socket.create_server(("127.0.0.1", port)).close()  # nobody else holds it
    finally:
        ours.send("done")
        engine.join(10)
    assert engine.exitcode == 0


SERVE = """
import multiprocessing, os, socket, sys, threading, types

sys.modules["vllm.entrypoints.cli"] = types.ModuleType("cli")
sys.argv = ["vllm", "serve", "model"]
from vllm_neuron.plugin.processes import choose_start_method, note_start, seconds_since_start


def settled():
    names = [thread.name for thread in threading.enumerate()]
    return os.readlink(f"/proc/self/fd/{listener.fileno()}"), "neuron-parent-watch" in names


def engine(pipe):
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(settled()))
    worker.start()
    pipe.send((settled(), ours.recv(), seconds_since_start()))


choose_start_method(cpu_mode=True)
note_start()
listener = socket.create_server(("127.0.0.1", 0))
ours, theirs = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=engine, args=(theirs,)).start()
of_engine, of_worker, seconds = ours.recv()
assert of_engine == of_worker == (os.devnull, True), (of_engine, of_worker)
assert 0.02 < seconds <= seconds_since_start(), seconds
"""


def test_engine_and_worker_of_vllm_serve_settle_before_anything_of_theirs_runs(tmp_path: Path) -> None:
    """With workers of their own the engine's process runs nothing of this package for as long as they load."""
    program = tmp_path / "serve.py"
    program.write_text(SERVE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_users_own_process_keeps_its_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settle_engine_process()
        socket.create_connection(listener.getsockname(), timeout=5).close()
