"""The folder where the metrics of all processes of one server meet: prometheus_client's multiprocess mode.

The engine counts in a process of its own and /metrics is answered by another. Each process keeps its values in files of
its own below PROMETHEUS_MULTIPROC_DIR, and a scrape adds the files up.
"""

import atexit
import functools
import logging
import multiprocessing
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

logger = logging.getLogger(__name__)

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
PREFIX = "vllm_neuron_prometheus_"
_MADE = "_NEURON_METRICS_FOLDER"
"""Environment variable with the process that has made the folder, and the folder: a server that is started from another
one's environment takes, and removes, none that is not its own."""

FILE_KINDS = ("counter", "histogram", "summary", "gauge_mostrecent", "gauge_sum")
LONG_AGO = 1.0
"""Seconds since 1970: earlier than any value that was set."""

FILE_BYTES = 1 << 20
"""Of each file; a process of vLLM writes about 100 KiB into its largest."""


@functools.cache
def prepare_folder() -> None:
    """In the process that starts engines: make the folder, and have prometheus_client use it from now on.

    A folder that the user has named is kept, less what processes that are gone have left in it: it would be counted
    again. Any other is made, and is removed when this process ends.

    To be called before vLLM makes its metrics and before the engine's process starts. It may come after the import of
    prometheus_client: metrics that were made before stay in this process, all later ones are shared.
    """
    if multiprocessing.parent_process() is not None:
        # One of several API servers.
        if VARIABLE in os.environ:
            _use_files()
        return
    named = os.environ.get(VARIABLE)
    if named and named != _made()[1]:
        folder = Path(named)
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale(folder)
    else:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        os.environ[VARIABLE], os.environ[_MADE] = str(folder), f"{os.getpid()} {folder}"
        atexit.register(_remove_at_exit, os.getpid())
    reserve(folder)
    _use_files()


def reserve(folder: Path) -> None:
    """Take the disk space of this process's files ahead.

    prometheus_client maps its files into memory, where a disk that is full later would end the process with SIGBUS.

    Raises:
        OSError: there is no space for them, or no such folder; the text names it and the variable that moves it.
    """
    try:
        for kind in FILE_KINDS:
            with (folder / f"{kind}_{os.getpid()}.db").open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: metrics take {len(FILE_KINDS) * FILE_BYTES >> 20} MiB per process here. Make that much "
            f"free, or set {VARIABLE} (or TMPDIR) to another folder",
            str(folder),
        ) from error


def reserve_for_engine() -> None:
    """`reserve` in the folder that the server's first process has prepared; nothing where there is none."""
    if folder := os.environ.get(VARIABLE):
        reserve(Path(folder))


def remove_stale(folder: Path) -> None:
    """Delete files of processes that are gone, also where a later process has the number of one of them."""
    for file in folder.glob("*_*.db"):
        with suppress(OSError, ValueError):
            if not _is_of_running_process(file):
                file.unlink()


def remove_folder(pid: int) -> None:
    """Delete the folder that process ``pid`` has made, if it has; one that the user has named stays."""
    maker, made = _made()
    if maker == str(pid):
        shutil.rmtree(made, ignore_errors=True)


def _made() -> tuple[str, str]:
    """The process that has made a folder, and the folder; empty if none has."""
    maker, _, made = os.environ.get(_MADE, "").partition(" ")
    return maker, made


def _remove_at_exit(pid: int) -> None:
    # A fork ends as its parent would, and must leave the folder.
    if os.getpid() == pid:
        remove_folder(pid)


def _is_of_running_process(file: Path) -> bool:
    pid = int(file.stem.rpartition("_")[2])
    try:
        return psutil.Process(pid).create_time() <= file.stat().st_mtime
    except psutil.NoSuchProcess:
        return False


@functools.cache
def _use_files() -> None:
    """Let metrics keep their values in files, also if prometheus_client was imported before the variable was set.

    Gauges of which the latest value counts, as all of vLLM's, are there at 0 from the beginning: prometheus_client
    shows them only once they have been set. And what is made anew, by the second engine of a process, begins at 0.
    """
    from prometheus_client import values

    # A second class of that kind would write into the same files at the places where the first one does.
    in_file: Any = values.ValueClass if values.ValueClass._multiprocess else values.MultiProcessValue()

    class ShownValue(in_file):
        def __init__(self, *texts: Any, multiprocess_mode: str = "", **others: Any) -> None:
            super().__init__(*texts, multiprocess_mode=multiprocess_mode, **others)
            self.set(0.0, timestamp=LONG_AGO if multiprocess_mode == "mostrecent" else None)

    values.ValueClass = ShownValue
