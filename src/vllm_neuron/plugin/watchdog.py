"""Ends an engine process whose parent is gone, so that a killed server leaves nothing behind."""

import multiprocessing
import os
import threading
import time

import psutil

from vllm_neuron.plugin.metrics_folder import remove_folder

POLL_SECONDS = 1.0
_THREAD = "neuron-parent-watch"


def watch_parent() -> None:
    """Start watching the parent of this process, once, if it is one that multiprocessing has started.

    To be called as early as an engine process can: it waits minutes for a server that was killed while it started. An
    engine that runs inside the user's own process is left alone: that process may well outlive its shell.
    """
    if multiprocessing.current_process().name == "MainProcess":
        return
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(os.getppid(),), name=_THREAD, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == (parent := _parent(parent)):
        time.sleep(POLL_SECONDS)
    for child in psutil.Process().children(recursive=True):
        # Compilers that are still running.
        child.kill()
    # What that process would have removed at its own end.
    remove_folder(parent)
    os._exit(1)


def _parent(pid: int) -> int:
    """The parent as multiprocessing knows it, which it does only some time after a process has begun; else `pid`."""
    known = multiprocessing.parent_process()
    return pid if known is None or known.pid is None else known.pid
