"""The pool of compile processes: what they return, how they fail, and that none of them stays behind."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_neuron.compilation.pool import Job, JobDone, JobFailedError, run_jobs

LONG = 1000


def double(number: int) -> int:
    return 2 * number


def append_and_wait(argument: tuple[Path, str, float]) -> int:
    """Add a line to a file, sleep, and return the process."""
    path, line, seconds = argument
    with path.open("a") as file:
        file.write(line + "\n")
    time.sleep(seconds)
    return os.getpid()


def fail(message: str) -> None:
    print("compiler: error on line 3")
    raise ValueError(message)


def chatter(megabytes: int) -> str:
    """Print much, past Python's own streams, and return what there is to read."""
    os.write(1, (b"x" * 63 + b"\n") * (megabytes << 14))
    return sys.stdin.read()


def exit_with(code: int) -> None:
    print("compiler: internal error")
    os._exit(code)


def environment(name: str) -> tuple[str | None, bool, list[str]]:
    return os.environ.get(name), os.getsid(0) == os.getpid(), sys.path


def make_lambda(argument: None) -> Callable[[], None]:
    return lambda: None


def start_compiler(path: Path) -> subprocess.Popen[bytes]:
    """Something that runs for long and takes no hint; the file tells the numbers of all processes of the session."""
    compiler = subprocess.Popen(["sh", "-c", f"trap '' TERM; sleep {LONG}"])
    guard = [child.pid for child in psutil.Process().children(recursive=True)]
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps([os.getpid(), *guard]))
    aside.rename(path)
    return compiler


def compile_for_long(path: Path) -> None:
    start_compiler(path).wait()


def die_with_a_compiler(path: Path) -> None:
    start_compiler(path)
    os.kill(os.getpid(), signal.SIGKILL)


def clean_up_when_told(path: Path) -> None:
    try:
        path.write_text("busy")
        time.sleep(LONG)
    finally:
        path.unlink()


def read_pids(path: Path) -> list[int]:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return list(json.loads(path.read_text()))


def assert_gone(pids: list[int]) -> None:
    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    assert len(pids) >= 3
    deadline = time.monotonic() + 3
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    files = len(os.listdir("/proc/self/fd"))
    before = psutil.Process().children()
    yield
    assert [child for child in psutil.Process().children() if child not in before] == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers
    assert len(os.listdir("/proc/self/fd")) == files


def run(jobs: list[Job], logs: Path, workers: int = 2, timeout: float | None = None) -> dict[str, Any]:
    return run_jobs(jobs, workers, timeout, logs, lambda done: None)


def test_results_come_back_by_name_and_are_reported_as_they_come(logs: Path) -> None:
    seen: list[JobDone] = []
    jobs = [Job(f"graph{i}", double, i) for i in range(7)]
    assert run_jobs(jobs, 2, 60, logs, seen.append) == {f"graph{i}": 2 * i for i in range(7)}
    assert [(done.index, done.total) for done in seen] == [(i + 1, 7) for i in range(7)]
    assert {(done.name, done.result) for done in seen} == {(f"graph{i}", 2 * i) for i in range(7)}
    assert list(logs.iterdir()) == []


def test_no_jobs_start_no_process(logs: Path) -> None:
    assert run([], logs) == {}


def test_jobs_start_in_their_order(tmp_path: Path, logs: Path) -> None:
    order = tmp_path / "order"
    names = ["largest", "large", "small", "smallest"]
    processes = run([Job(name, append_and_wait, (order, name, 0)) for name in names], logs, workers=1)
    assert order.read_text().split() == names
    assert len(set(processes.values())) == 1


def test_as_many_run_at_once_as_there_are_workers_and_each_serves_many_jobs(tmp_path: Path, logs: Path) -> None:
    jobs = [Job(f"graph{i}", append_and_wait, (tmp_path / "order", "x", 0.1)) for i in range(9)]
    processes = run(jobs, logs, workers=3)
    assert len(set(processes.values())) == 3
    assert os.getpid() not in processes.values()


def test_processes_have_our_environment_and_modules_and_a_session_of_their_own(
    logs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OF_THE_POOL", "here")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run([Job("graph", environment, "OF_THE_POOL")], logs) == {"graph": ("here", True, sys.path)}


def test_what_compilers_print_disturbs_no_answer_and_they_have_no_input(logs: Path) -> None:
    assert run([Job("graph", chatter, 1), Job("other", double, 1)], logs) == {"graph": "", "other": 2}


def test_failure_is_told_first_with_the_end_of_its_log_and_stops_the_others(tmp_path: Path, logs: Path) -> None:
    others = tmp_path / "others"
    jobs = [
        Job("decode_b8", compile_for_long, others),
        Job("decode_b4", fail, "no room for the weights\nsecond line"),
        Job("decode_b2", append_and_wait, (tmp_path / "order", "started", 0)),
    ]
    start = time.monotonic()
    with pytest.raises(JobFailedError) as caught:
        run(jobs, logs)
    assert time.monotonic() - start < 10
    lines = str(caught.value).splitlines()
    assert lines[0] == f"Compiling decode_b4 failed: ValueError: no room for the weights. Log: {caught.value.log}"
    assert lines[1:] == ["  compiler: error on line 3"]
    assert caught.value.name == "decode_b4"
    assert list(logs.iterdir()) == [caught.value.log]
    assert "Traceback" in caught.value.log.read_text()
    assert not (tmp_path / "order").exists()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.name, again.log) == (str(caught.value), "decode_b4", caught.value.log)
    if others.exists():
        assert_gone(read_pids(others))


def test_only_the_end_of_a_long_log_is_shown(logs: Path) -> None:
    with pytest.raises(JobFailedError) as caught:
        run([Job("graph", chatter_and_exit, 1)], logs)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[-1] == "  last words"


def chatter_and_exit(megabytes: int) -> None:
    chatter(megabytes)
    print("last words")
    os._exit(1)


def test_exit_of_a_process_is_told_with_its_code(logs: Path) -> None:
    with pytest.raises(JobFailedError, match=r"^Compiling graph failed: its process ended with exit code 70\. Log: "):
        run([Job("graph", exit_with, 70)], logs)


def test_killed_process_is_told_with_the_signal_and_its_compilers_go_too(tmp_path: Path, logs: Path) -> None:
    with pytest.raises(
        JobFailedError, match=r"graph failed: its process was killed by signal 9 .*COMPILE_WORKERS\. Log"
    ):
        run([Job("graph", die_with_a_compiler, tmp_path / "pids")], logs)
    assert_gone(read_pids(tmp_path / "pids"))


def test_job_that_takes_too_long_is_ended_with_all_it_has_started(tmp_path: Path, logs: Path) -> None:
    start = time.monotonic()
    with pytest.raises(
        JobFailedError, match=r"decode_b8 failed: took longer than NEURON_LIBTORCH_COMPILATION_TIMEOUT=1 s"
    ):
        run([Job("decode_b8", compile_for_long, tmp_path / "pids")], logs, timeout=1)
    assert time.monotonic() - start < 8
    assert_gone(read_pids(tmp_path / "pids"))


def test_each_job_has_the_whole_time(tmp_path: Path, logs: Path) -> None:
    jobs = [Job(f"graph{i}", append_and_wait, (tmp_path / "order", "x", 0.6)) for i in range(3)]
    assert len(run(jobs, logs, workers=1, timeout=1)) == 3


def test_importing_a_job_does_not_count_as_its_time(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import os, time\ntime.sleep(float(os.environ.get('OF_THE_IMPORT', 0)))\ndef job(argument): return argument\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    job = import_module("slow_to_import").job
    monkeypatch.setenv("OF_THE_IMPORT", "1.5")
    assert run([Job("graph", job, 1)], logs, timeout=1) == {"graph": 1}


def test_stopped_job_may_remove_its_temporary_files(tmp_path: Path, logs: Path) -> None:
    busy = tmp_path / "busy"
    with pytest.raises(JobFailedError, match="took longer"):
        run([Job("graph", clean_up_when_told, busy)], logs, timeout=0.5)
    assert not busy.exists()


def test_result_that_cannot_be_sent_is_a_failure(logs: Path) -> None:
    with pytest.raises(JobFailedError, match=r"graph failed: \w+Error: "):
        run([Job("graph", make_lambda, None)], logs)


def test_job_that_cannot_be_sent_is_refused(logs: Path) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        run([Job("graph", lambda argument: None, None)], logs)


def test_job_that_cannot_be_imported_is_a_failure(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "soon_gone.py").write_text("def job(argument): return argument\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = import_module("soon_gone").job
    (tmp_path / "soon_gone.py").unlink()
    with pytest.raises(JobFailedError, match=r"graph failed: ModuleNotFoundError: No module named 'soon_gone'\. Log"):
        run([Job("graph", job, 1)], logs)


def test_error_of_the_report_ends_everything(tmp_path: Path, logs: Path) -> None:
    def refuse(done: JobDone) -> None:
        raise KeyError("report")

    jobs = [Job("quick", double, 1), Job("long", compile_for_long, tmp_path / "pids")]
    with pytest.raises(KeyError, match="report"):
        run_jobs(jobs, 2, None, logs, refuse)
    assert list(logs.iterdir()) == []


def _run_in_daemon(logs: Path) -> None:
    assert multiprocessing.current_process().daemon
    (logs.parent / "result").write_text(str(run([Job("graph", double, 21)], logs)["graph"]))


def test_daemonic_process_may_have_a_pool(logs: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_run_in_daemon, args=(logs,), daemon=True)
    process.start()
    process.join(60)
    assert (logs.parent / "result").read_text() == "42"
    process.close()


PARENT = """
import signal, sys
from pathlib import Path
from tests.engine.test_pool import Job, compile_for_long, run
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
here = Path(sys.argv[1])
run([Job(f"graph{i}", compile_for_long, here / f"pids{i}") for i in range(2)], here / "logs")
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 3)]
)
def test_end_of_the_parent_is_the_end_of_all(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stderr=subprocess.DEVNULL) as parent:
        pids = read_pids(tmp_path / "pids0") + read_pids(tmp_path / "pids1")
        start = time.monotonic()
        parent.send_signal(number)
        try:
            assert parent.wait(10) == status
        finally:
            parent.kill()
    assert time.monotonic() - start < 4
    assert_gone(pids)
    if number != signal.SIGKILL:
        assert list((tmp_path / "logs").iterdir()) == []
