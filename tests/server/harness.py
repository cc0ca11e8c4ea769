"""Starts real `vllm serve` processes in CPU mode and stops them, and knows every process that they started."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil

BACKENDS = ("neuron_native", "vllm_neuron")
MODEL_NAME = "served"
START_SECONDS = 240
BIN = Path(sys.executable).parent

TINY_ARGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "512", "--max-num-seqs", "4"),
    *("--block-size", "32", "--num-gpu-blocks-override", "80"),
)
TINY_CONFIG = {"neuron_config": {"num_batched_tokens_buckets": [128, 256, 512], "num_seqs_buckets": [1, 2, 4]}}

_MARK = "SERVER_UNDER_TEST"
"""Environment variable that all processes of a server inherit, whatever session or group they move to."""
_STARTED_BY = "SERVER_STARTED_BY"
"""The same for all servers of one process of pytest."""

_WATCHER = """
import os, signal, sys

sys.stdin.read()  # until pytest is gone, whatever it died of
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            if sys.argv[1].encode() in environment.read().split(b"\\0"):
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


@dataclass
class Server:
    """One `vllm serve` and everything it started.

    Attributes:
        process: the API server.
        port: it listens on.
        log: file of its output.
        mark: value of the variable that its processes carry.
    """

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    mark: str
    client: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        """Everything of this server that still lives."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error, ProcessLookupError):
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return os.getsid(process.pid) == self.process.pid or process.environ().get(_MARK) == self.mark
        return False

    def engine_core(self) -> psutil.Process:
        """The process that runs the engine, by the title that vLLM gives it."""
        found = [p for p in self.processes() if "EngineCor" in p.name() or "EngineCor" in " ".join(p.cmdline())]
        assert len(found) == 1, f"{found}\n{self.tail()}"
        return found[0]

    def text(self) -> str:
        """All output so far."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def health(self) -> int:
        """Status of /health; 0 when nobody answers."""
        return http("GET", f"{self.url}/health", timeout=5)[0]

    def rpc(self, method: str) -> Any:
        """What the worker's method returns, through the development endpoint."""
        status, body = http("POST", f"{self.url}/collective_rpc", {"method": method})
        assert status == 200, body
        return body["results"][0]

    def metric(self, name: str) -> float:
        """Sum of a Prometheus series over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def wait_for_log(self, text: str, seconds: float = START_SECONDS) -> None:
        wait_until(lambda: text in self.text() or self.process.poll() is not None, seconds, f"log line {text!r}", self)
        assert text in self.text(), self.tail()

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"vllm serve ended with {self.process.returncode}:\n{self.tail()}"
            return self.health() == 200

        wait_until(ready, START_SECONDS, "a ready server", self)

    def assert_gone(self, seconds: float) -> None:
        """No process of this server lives after `seconds`; those that do are removed before the test fails."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.1)
        described = [f"{p.pid} {p.name()} {p.status()}" for p in left if p.is_running()]
        self.kill_all()
        assert not described, f"left after {seconds} s: {described}\n{self.tail()}"

    def stop(self, seconds: float = 20) -> None:
        """SIGTERM, and nothing is left after `seconds`."""
        self.process.send_signal(signal.SIGTERM)
        self.assert_gone(seconds)

    def stop_group(self, seconds: float = 20) -> None:
        """Ctrl-C on a terminal: every process of the group gets SIGINT."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.assert_gone(seconds)

    def kill_all(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait(10)
        self.client.close()


def http(method: str, url: str, body: object = None, timeout: float = 60) -> tuple[int, Any]:
    """(status, decoded JSON or text); status 0 when there is no answer at all."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, _decode(response.read())
    except urllib.error.HTTPError as error:
        return error.code, _decode(error.read())
    except OSError as error:
        return 0, str(error)


def _decode(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def wait_until(condition: Callable[[], bool], seconds: float, what: str, server: Server | None = None) -> float:
    """Seconds until the condition held; fails after `seconds`."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            raise AssertionError(f"no {what} after {seconds} s\n{server.tail() if server else ''}")
        time.sleep(0.1)
    return time.monotonic() - begin


def launch(
    model: Path,
    backend: str,
    folder: Path,
    cache: Path,
    args: Sequence[str] = TINY_ARGS,
    config: Mapping[str, Any] | None = TINY_CONFIG,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Server:
    """Start `vllm serve` and return at once.

    Args:
        model: checkpoint folder.
        backend: value of VLLM_NEURON_BACKEND.
        folder: for the log.
        cache: value of VLLM_CACHE_ROOT.
        args: further arguments.
        config: additional_config.
        env: further environment.
        port: to listen on; by default one that is free.
    """
    port = port or free_port()
    command = [str(BIN / "vllm"), "serve", str(model), "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), *args]
    if config is not None:
        command += ["--additional-config", json.dumps(config)]
    return start(command, port, folder, cache, {"VLLM_NEURON_BACKEND": backend, **(env or {})})


def start(command: Sequence[str], port: int, folder: Path, cache: Path, env: Mapping[str, str]) -> Server:
    """Run any command that ends up serving on `port`, in `folder`, with a log there."""
    mark = uuid.uuid4().hex
    log = folder / f"serve-{mark[:8]}.log"
    ours = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "VLLM_NEURON_CPU_MODE": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",  # tiny models only lose by being split
        "SPT_NOENV": "1",  # process titles would overwrite the mark
        _MARK: mark,
        _STARTED_BY: _started_by(),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**clean_environment(), **ours, **env},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(process, port, log, mark)


@functools.cache
def _started_by() -> str:
    """Value of `_STARTED_BY`; when this process ends, even by a kill, so does everything that carries it."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-S", "-c", _WATCHER, f"{_STARTED_BY}={mark}"]
    _watchers.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
    return mark


_watchers: list[subprocess.Popen[bytes]] = []
"""Kept, because the end of their standard input is what they wait for."""


def clean_environment() -> dict[str, str]:
    """This process's environment without anything that configures vLLM or the plugin."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "NEURON_"))}


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(*launch_args: Any, **launch_kwargs: Any) -> Iterator[Server]:
    """A ready server; SIGTERM ends it, and no process may be left."""
    server = launch(*launch_args, **launch_kwargs)
    try:
        server.wait_ready()
        yield server
    except BaseException:
        server.kill_all()
        raise
    server.stop()


def run_to_end(*launch_args: Any, seconds: float = START_SECONDS, **launch_kwargs: Any) -> tuple[int, str]:
    """(exit code, output) of a `vllm serve` that is expected to end by itself, with nothing left behind."""
    server = launch(*launch_args, **launch_kwargs)
    try:
        code = server.process.wait(seconds)
    except subprocess.TimeoutExpired:
        server.kill_all()
        raise AssertionError(f"still running after {seconds} s:\n{server.tail()}") from None
    server.assert_gone(5)
    return code, server.text()
