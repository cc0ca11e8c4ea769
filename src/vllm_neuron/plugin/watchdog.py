"""Ends an engine process whose parent is gone, so that a killed server leaves nothing behind."""

import multiprocessing
import os
import threading
import time

import psutil

POLL_SECONDS = 1.0


def watch_parent() -> None:
    """Start watching the parent of this process, if it is one that multiprocessing has started.

    An engine that runs inside the user's own process is left alone: that process may well outlive its shell.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    threading.Thread(target=_watch, args=(parent.pid,), name="neuron-parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    for child in psutil.Process().children(recursive=True):
        # Compilers that are still running.
        child.kill()
    os._exit(1)
