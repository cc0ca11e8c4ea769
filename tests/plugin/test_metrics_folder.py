"""One folder per server, shared by its processes and by nobody else, and nothing left of it."""

import errno
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.engine.test_mounted_caches import NAMESPACE, may_mount
from vllm_neuron.plugin.metrics_folder import PREFIX, VARIABLE, remove_folder, remove_stale, reserve

SERVER = """
import multiprocessing, os, subprocess, sys
{first}
from vllm_neuron.plugin.metrics_folder import prepare_folder, reserve_for_engine

def count(pipe=None):
    prepare_folder()
    reserve_for_engine()
    from prometheus_client import CollectorRegistry, Counter, Gauge
    Counter("steps", "", registry=CollectorRegistry()).inc(5)
    Counter("steps", "", registry=CollectorRegistry()).inc()
    set_by_engine = Gauge("running", "", registry=CollectorRegistry(), multiprocess_mode="mostrecent")
    Gauge("never_set", "", registry=CollectorRegistry(), multiprocess_mode="mostrecent")
    if pipe is not None:
        set_by_engine.set(3)
        pipe.send(os.environ["{variable}"])

def main():
    prepare_folder()
    count()
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.get_context(sys.argv[1]).Process(target=count, args=(theirs,))
    engine.start()
    assert ours.recv() == os.environ["{variable}"]
    engine.join()
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    lines = generate_latest(registry).decode().splitlines()
    print(os.environ["{variable}"], *sorted(line for line in lines if line[0] != "#"))
    if len(sys.argv) > 2:
        # Another server, started from this one.
        subprocess.run([sys.executable, *sys.argv[:2]], check=True)
        print(os.path.isdir(os.environ["{variable}"]))

if __name__ == "__main__":
    # Each server is a process of its own.
    for _ in range({starts}):
        pid = os.fork()
        if not pid:
            main()
            sys.exit()
        assert os.waitpid(pid, 0)[1] == 0
"""


SERIES = "never_set 0.0 running 3.0 steps_total 2.0"


def serve(folder: Path, *arguments: str, first: str = "", starts: int = 1, **env: str) -> list[str]:
    """Lines that servers printed, one after the other; `first` is what their program begins with."""
    program = folder / "server.py"
    program.write_text(SERVER.format(first=textwrap.dedent(first), variable=VARIABLE, starts=starts))
    clean = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "_NEURON_METRICS_FOLDER")}
    env = {**clean, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path), **env}
    done = subprocess.run([sys.executable, str(program), *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("first", ["", "import prometheus_client"])
def test_processes_of_a_server_share_a_folder_that_goes_with_it(method: str, first: str, tmp_path: Path) -> None:
    ((folder, *series),) = [line.split(" ", 1) for line in serve(tmp_path, method, first=first)]
    assert Path(folder).name.startswith(PREFIX)
    assert series == [SERIES]
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_twenty_starts_leave_no_folder(tmp_path: Path) -> None:
    lines = serve(tmp_path, "fork", first="import prometheus_client", starts=20)
    assert [line.split(" ", 1)[1] for line in lines] == [SERIES] * 20
    assert len({line.split()[0] for line in lines}) == 20
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_servers_that_inherit_the_environment_of_another_do_not_mix_with_it(tmp_path: Path) -> None:
    outer, inner, still_there = serve(tmp_path, "fork", "and another")
    assert still_there == "True"
    assert outer.split()[0] != inner.split()[0]
    assert outer.split()[1:] == inner.split()[1:] == SERIES.split()
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_a_process_removes_the_folder_of_the_server_it_belongs_to_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_NEURON_METRICS_FOLDER", f"4711 {tmp_path}")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    remove_folder(4712)
    assert tmp_path.is_dir()
    remove_folder(4711)
    assert not tmp_path.exists()


def test_a_folder_of_the_user_stays_and_counts_no_earlier_server(tmp_path: Path) -> None:
    named = tmp_path / "mine" / "metrics"
    lines = serve(tmp_path, "fork", first="import prometheus_client", starts=20, **{VARIABLE: str(named)})
    assert lines == [f"{named} {SERIES}"] * 20
    assert named.is_dir()


def test_stale_files_are_those_whose_process_is_gone_or_younger(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {f"counter_{gone.pid}.db": False, f"gauge_mostrecent_{os.getpid()}.db": True, "counter_x.db": True}
    for name in names:
        (tmp_path / name).touch()
    reused = tmp_path / f"histogram_{os.getpid()}.db"
    reused.touch()
    long_ago = time.time() - 10 * 365 * 86400
    os.utime(reused, (long_ago, long_ago))
    (tmp_path / "notes.txt").touch()
    remove_stale(tmp_path)
    kept = {name for name, keep in names.items() if keep} | {"notes.txt"}
    assert {path.name for path in tmp_path.iterdir()} == kept


FULL = """
import subprocess, sys
from pathlib import Path
from vllm_neuron.plugin.metrics_folder import reserve

folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
try:
    reserve(folder)
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("namespace", [NAMESPACE] if may_mount() else [])
def test_a_full_disk_is_named_before_it_could_end_a_process(namespace: list[str], tmp_path: Path) -> None:
    command = [*namespace, sys.executable, "-c", FULL, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    text = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    for part in ("No space left on device", str(tmp_path), VARIABLE, "5 MiB"):
        assert part in text


def test_a_disk_without_space_names_folder_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"No space left.*{VARIABLE}.*{tmp_path}"):
        reserve(tmp_path)
