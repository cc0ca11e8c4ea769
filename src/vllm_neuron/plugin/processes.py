"""How the engine's process is started, and what a forked one has to put right."""

import multiprocessing
import os
import socket
import sys
from contextlib import suppress

from vllm_neuron.plugin.watchdog import watch_parent

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_COMMAND_LINE = "vllm.entrypoints.cli"


def choose_start_method(cpu_mode: bool) -> None:
    """Fork the engine of `vllm serve` in CPU mode, spawn every other; a method that the user has set is kept.

    A spawned engine imports vLLM and torch once more, which is a third of a warm start. A forked one hangs if its
    parent has used torch's thread pool or an XLA client: `vllm serve` never does, a user's own program may. On devices
    nothing is forked, because nobody has tried what Neuron's runtime makes of it.

    To be called before `vllm serve` chooses for itself, which it does right after its imports.
    """
    vllm_serve = _COMMAND_LINE in sys.modules and sys.argv[1:2] == ["serve"]
    os.environ.setdefault(START_METHOD, "fork" if cpu_mode and vllm_serve else "spawn")


def settle_engine_process() -> None:
    """Make an engine's own process end with its parent, and give up the sockets that a fork has handed to it.

    Without that a killed server would leave its port taken. Does nothing in a user's own process.
    """
    if multiprocessing.parent_process() is None:
        return
    watch_parent()
    _give_up_listeners(os.getppid())


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
