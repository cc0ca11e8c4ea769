"""How the engine's process is started, and what a forked one has to put right."""

import multiprocessing
import os
import socket
import sys
import time
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

from vllm_neuron.plugin.watchdog import watch_parent

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_COMMAND_LINE = "vllm.entrypoints.cli"
_API_SERVER = "vllm.entrypoints.openai.api_server"
_STARTED = "_NEURON_SERVER_STARTED"
"""Environment variable that tells the engine when its server began: seconds since boot, which no clock change moves."""


def choose_start_method(cpu_mode: bool) -> None:
    """Fork the engine of `vllm serve` in CPU mode, spawn every other; a method that the user has set is kept.

    A spawned engine imports vLLM and torch once more, which is a third of a warm start. A forked one hangs if its
    parent has used torch's thread pool or an XLA client: `vllm serve` never does, a user's own program may. On devices
    nothing is forked, because nobody has tried what Neuron's runtime makes of it.

    To be called before `vllm serve` chooses for itself, which it does right after its imports.
    """
    if _is_vllm_serve():
        # Of engine and worker processes, whichever forks which: in those that run no worker nothing else calls it.
        util.register_after_fork(settle_engine_process, _settle)
    os.environ.setdefault(START_METHOD, "fork" if cpu_mode and _is_vllm_serve() else "spawn")


def settle_engine_process() -> None:
    """Make an engine's own process end with its parent, and give up the sockets that a fork has handed to it.

    Without that a killed server would leave its port taken. Does nothing in a user's own process.
    """
    if multiprocessing.parent_process() is None:
        return
    watch_parent()
    _give_up_listeners(os.getppid())


def note_start() -> None:
    """In the process that starts engines: keep when the server began, for `seconds_since_start`.

    A process that does nothing but serve began with itself, a user's own program where it asks for an engine.
    """
    if multiprocessing.parent_process() is None:
        age = _process_age() if _is_server() else 0.0
        os.environ[_STARTED] = str(time.clock_gettime(time.CLOCK_BOOTTIME) - age)


def seconds_since_start() -> float:
    """Seconds since the server began. 0 where `note_start` was not called."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now - float(os.environ.get(_STARTED, now))


def addresses_to_listen_on() -> set[tuple[str, int]]:
    """Host and port of each TCP socket that this process keeps for listening, and does not listen on yet."""
    found = set()
    for descriptor in _sockets(os.getpid()):
        if _accepts_connections(descriptor):
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(copy.getsockname()[:2])
    return found


def _is_vllm_serve() -> bool:
    return _COMMAND_LINE in sys.modules and sys.argv[1:2] == ["serve"]


def _is_server() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _is_vllm_serve() or (spec is not None and spec.name == _API_SERVER)


def _process_age() -> float:
    # The 22nd field; the second, a name in parentheses, may have spaces.
    start_ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start_ticks) / os.sysconf("SC_CLK_TCK")


def _settle(_: object) -> None:
    settle_engine_process()


def _give_up_listeners(parent: int) -> None:
    """Replace each TCP socket that `parent` keeps for listening by /dev/null: its number stays taken, so that the copy
    of the parent's socket object, once collected, closes nothing else."""
    shared = set(_sockets(parent).values())
    for descriptor, number in _sockets(os.getpid()).items():
        if number in shared and _accepts_connections(descriptor):
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, descriptor)
            os.close(nothing)


def _sockets(pid: int) -> dict[int, str]:
    """Descriptors of a process that are sockets, and the number of each; none if the process is gone."""
    found = {}
    with suppress(OSError):
        for link in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found[int(link.name)] = os.readlink(link.path)
    return {descriptor: target for descriptor, target in found.items() if target.startswith("socket:")}


def _accepts_connections(descriptor: int) -> bool:
    """Whether it is a TCP socket with a port and no peer. It may not listen yet: vLLM binds long before it listens."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        with suppress(OSError):
            copy.getpeername()
            return False
        return copy.getsockname()[1] != 0
