"""Runs compile jobs in processes that can be killed, each one job at a time.

The processes are started by `subprocess`, not by `multiprocessing`: a process of vLLM may be daemonic, which forbids it
children of the latter kind. Each leads a session of its own, so that it and the compilers it starts can be ended as
one. None of them outlives `run_jobs`, nor the process that called it, however that ends.
"""

import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from vllm_neuron.compilation import pool_worker

_GRACE_SECONDS = 1.0
"""From SIGTERM to SIGKILL."""

_POLL_SECONDS = 0.01

_CHECK_SECONDS = 1.0
"""How often to look for a process that is gone although another holds its end of the pipe."""

_TAIL_BYTES = 1 << 14
_TAIL_LINES = 3
"""Few, because vLLM prints some fifty lines of its own after the error; the cause should still be in sight."""


@dataclass(frozen=True)
class Job:
    """A call that another process makes.

    Attributes:
        name: what is compiled, for messages and the name of the log file.
        function: a function of a module, which the process imports.
        argument: what it is called with; pickled, as its result is.
    """

    name: str
    function: Callable[[Any], Any]
    argument: Any


@dataclass(frozen=True)
class JobDone:
    """A job has returned.

    Attributes:
        name: the job's name.
        index: how many jobs have returned now, this one included.
        total: how many there are.
        result: what its function returned.
    """

    name: str
    index: int
    total: int
    result: Any


class JobFailedError(RuntimeError):
    """A job has not returned. The first line of the text has the cause, the others are what was printed last.

    Attributes:
        name: the job's name.
        reason: what became of it.
        log: file with all that it and its compilers have printed.
        last_lines: the last of that.
    """

    def __init__(self, name: str, reason: str, log: Path, last_lines: Sequence[str] = ()) -> None:
        cause = f"Compiling {name} failed: {reason.rstrip('.')}. Log: {log}"
        super().__init__("\n  ".join((cause, *last_lines)))
        self.name, self.reason, self.log, self.last_lines = name, reason, log, last_lines

    def __reduce__(self) -> tuple[type, tuple[str, str, Path, Sequence[str]]]:
        return type(self), (self.name, self.reason, self.log, self.last_lines)


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    timeout: float | None,
    log_folder: Path,
    report: Callable[[JobDone], None],
) -> dict[str, Any]:
    """Run jobs in their order. The first that fails stops all others.

    Args:
        jobs: their names differ.
        workers: most jobs that run at the same time.
        timeout: seconds that a job may take, the start of its process not counted; None for any time.
        log_folder: gets a log file per job, which is removed again unless it is that of the failure.
        report: is told of each job that has returned.

    Returns:
        The result of each job by its name.

    Raises:
        JobFailedError: a job raised an exception, took too long, or its process ended.
    """
    waiting = deque(jobs)
    processes: list[_Process] = []
    results: dict[str, Any] = {}
    failed: Path | None = None
    log_folder.mkdir(parents=True, exist_ok=True)
    try:
        while waiting and len(processes) < workers:
            processes.append(_Process(waiting.popleft(), log_folder))
        while busy := [process for process in processes if process.running]:
            wait([process.answers for process in busy], _patience(busy, timeout))
            for process in busy:
                if not process.poll(timeout):
                    continue
                process.log.unlink(missing_ok=True)
                results[process.job.name] = process.result
                report(JobDone(process.job.name, len(results), len(jobs), process.result))
                if waiting:
                    process.start(waiting.popleft())
        return results
    except JobFailedError as failure:
        failed = failure.log
        raise
    finally:
        _stop(processes)
        for process in processes:
            if process.log != failed:
                process.log.unlink(missing_ok=True)


class _Process:
    """A process, and the job it was given last.

    Attributes:
        job: that job.
        log: its log file.
        running: whether it has yet to return.
        result: what it has returned.
        answers: becomes readable when there is something to `poll`.
    """

    def __init__(self, job: Job, log_folder: Path) -> None:
        self._log_folder = log_folder
        self.result: Any = None
        self._expect(job)
        their_jobs, self._jobs = Pipe(duplex=False)
        self.answers, their_answers = Pipe(duplex=False)
        ends = their_jobs.fileno(), their_answers.fileno()
        with their_jobs, their_answers, self.log.open("ab") as log:
            # -P: nothing that happens to lie in the working directory is taken for a module of Python.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", pool_worker.__name__, *map(str, ends)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=ends,
                start_new_session=True,
            )
        self._send(sys.path)
        self._send_job()

    def start(self, job: Job) -> None:
        """Give it its next job."""
        self._expect(job)
        self._send_job()

    def poll(self, timeout: float | None) -> bool:
        """Whether the job has returned.

        Raises:
            JobFailedError: it has failed, or runs for longer than ``timeout`` seconds.
        """
        exit_status = self.exit_status()
        try:
            while self.answers.poll():
                kind, value = pool_worker.receive(self.answers)
                if kind == "raised":
                    raise self._failure(*value)
                if kind == "done":
                    self.running, self.result = False, value
                    return True
                self._since = time.monotonic()
        except (EOFError, OSError):
            exit_status = self.exit_status(_GRACE_SECONDS) or "its process has closed its pipe"
        if exit_status is not None:
            raise self._failure(exit_status)
        if timeout is not None and self.remaining(timeout) < 0:
            raise self._failure(
                f"took longer than NEURON_LIBTORCH_COMPILATION_TIMEOUT={timeout:g} s; raise that, or unset it"
            )
        return False

    def remaining(self, timeout: float) -> float:
        """Seconds until the job has taken ``timeout`` seconds; infinite while its modules are still being imported."""
        return self._since + timeout - time.monotonic()

    def exit_status(self, patience: float = 0.0) -> str | None:
        """How the process has ended, or None if it has not within ``patience`` seconds.

        It is left a zombie, so that its number stays that of its session for `_stop`.
        """
        deadline = time.monotonic() + patience
        while (status := os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)
        if status.si_code == os.CLD_EXITED:
            return f"its process ended with exit code {status.si_status}"
        killed = f"its process was killed by signal {status.si_status} ({signal.strsignal(status.si_status)})"
        if status.si_status == signal.SIGKILL:
            killed += "; if memory was short, lower NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS"
        return killed

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and to all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def reap(self) -> None:
        """Wait for the end of the process, and close its pipes."""
        self._process.wait()
        self._jobs.close()
        self.answers.close()

    def _expect(self, job: Job) -> None:
        self._call = pickle.dumps((job.function, job.argument))
        self.job, self.running, self._since = job, True, math.inf
        descriptor, log = tempfile.mkstemp(prefix=f"{job.name}.", suffix=".log", dir=self._log_folder)
        os.close(descriptor)
        self.log = Path(log)

    def _send_job(self) -> None:
        self._send((str(self.log), self._call))

    def _send(self, message: object) -> None:
        # A process that is gone is found by `poll`, with the reason.
        with suppress(BrokenPipeError):
            pool_worker.send(self._jobs, message)

    def _failure(self, reason: str, log_size: int | None = None) -> JobFailedError:
        return JobFailedError(self.job.name, reason, self.log, _last_lines(self.log, log_size))


def _patience(busy: Sequence[_Process], timeout: float | None) -> float:
    """Seconds until something is to be looked at even if no process answers."""
    if timeout is None:
        return _CHECK_SECONDS
    return max(0.0, min(_CHECK_SECONDS, *(process.remaining(timeout) for process in busy)))


def _stop(processes: Sequence[_Process]) -> None:
    """End processes and all that they have started: first with SIGTERM, then with SIGKILL."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        process.exit_status(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.reap()


def _last_lines(log: Path, size: int | None) -> list[str]:
    """The last lines that are not empty of a log file, or of its first ``size`` bytes."""
    with suppress(OSError), log.open("rb") as file:
        end = file.seek(0, os.SEEK_END) if size is None else size
        begin = file.seek(max(0, end - _TAIL_BYTES))
        lines = file.read(end - begin).decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-_TAIL_LINES:]
    return []
