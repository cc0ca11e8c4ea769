"""One `vllm serve` in processes of its own: started, asked, measured and stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL_NAME = "model"
START_SECONDS = 3600.0
"""A large model compiles for long; what is stuck is given up all the same."""
STOP_SECONDS = 30.0
LOG_TAIL = 3000


class ServerFailedError(RuntimeError):
    """A server has ended by itself or does not get ready; the text has the end of its log."""


class Server:
    """A server and everything that it started.

    Args:
        model: folder or name.
        flags: of `vllm serve`.
        environment: variables over those of this process.
        log: file for its output.
        python: interpreter of the environment that serves.
    """

    def __init__(
        self,
        model: str,
        flags: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        python: str = sys.executable,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, *flags]
        command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        # The counters of graphs are read through vLLM's endpoint for development; nobody else reaches this port.
        variables = os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | dict(environment)
        self._begin = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_answer(self) -> float:
        """Seconds from the start to the answer to a first request for one token.

        Raises:
            ServerFailedError: there is none.
        """
        body = {"model": MODEL_NAME, "prompt": [10, 11, 12], "max_tokens": 1}
        with httpx.Client(timeout=60) as client:  # a new one each time would take a third of a core from the start
            while time.monotonic() - self._begin < START_SECONDS:
                if self._process.poll() is not None:
                    raise ServerFailedError(f"vllm serve ended with {self._process.returncode}:\n{self._tail()}")
                with suppress(httpx.HTTPError):
                    response = client.post(f"{self.url}/v1/completions", json=body)
                    if response.status_code == 200:
                        return time.monotonic() - self._begin
                    raise ServerFailedError(f"vllm serve answers {response.status_code}: {response.text[:300]}")
                time.sleep(0.1)
        raise ServerFailedError(f"vllm serve has not answered after {START_SECONDS:.0f} s:\n{self._tail()}")

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def graph_statistics(self) -> dict[str, Any]:
        """Counters of graphs since the start; see `GraphStatistics`."""
        response = httpx.post(f"{self.url}/collective_rpc", json={"method": "graph_statistics"}, timeout=60)
        response.raise_for_status()
        statistics: dict[str, Any] = response.json()["results"][0]
        return statistics

    def peak_memory_gib(self) -> float:
        """Peak resident memory of its largest process, which is the engine, in GiB."""
        parent = psutil.Process(self._process.pid)
        return max(map(_peak_bytes, [parent, *parent.children(recursive=True)])) / 2**30

    def stop(self) -> None:
        """End all of its processes: by SIGTERM, and after half a minute by SIGKILL."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]


@contextmanager
def serving(
    model: str, flags: Sequence[str], environment: Mapping[str, str], log: Path, python: str = sys.executable
) -> Iterator[Server]:
    """A `Server` inside the block, answering or not."""
    server = Server(model, flags, environment, log, python)
    try:
        yield server
    finally:
        server.stop()


def _peak_bytes(process: psutil.Process) -> int:
    """Linux keeps the peak of each process in its status; 0 where the process is gone."""
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
