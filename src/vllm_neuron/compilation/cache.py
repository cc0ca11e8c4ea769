"""The local compile cache: each graph is compiled once, however many processes start at the same time."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from vllm_neuron import envs
from vllm_neuron.compilation.store import CorruptEntryError, EntryStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

Load = Callable[[bytes], T]
"""Turns a blob into what it was saved from; ValueError if it cannot."""

_WAIT_MESSAGE_SECONDS = 30.0


def local_cache_root() -> Path:
    """The folder of all routes' entries: ``$VLLM_CACHE_ROOT/neuron/compile_cache``."""
    return Path(envs.VLLM_CACHE_ROOT).expanduser() / "neuron" / "compile_cache"


class CompileCache:
    """Compiled graphs of one route on this machine.

    Nothing about the cache can stop a start: where it cannot be read or written, one WARNING says so and graphs are
    compiled as if there were none.

    Args:
        root: the folder of all routes' entries, or None to neither read nor write anything.
        route: name of the route.
        versions: the route's versions, noted in the manifests.
    """

    def __init__(self, root: Path | None, route: str, versions: Mapping[str, str]) -> None:
        self._store = EntryStore(root / route) if root is not None else None
        self._route = route
        self._versions = dict(versions)
        self._warned = False

    def fetch(self, key: str, load: Load[T]) -> T | None:
        """The entry of this key, or None if there is none that works."""
        if self._store is None:
            return None
        try:
            return self._read(key, load)
        except CorruptEntryError:
            return None

    def get_or_compile(self, key: str, graph: str, load: Load[T], compile_: Callable[[], tuple[T, bytes]]) -> T:
        """The entry of this key; compiled by ``compile_`` and stored if there is none.

        Only one process compiles a key at a time, and those that waited for it take its entry. A damaged entry is
        reported, removed and made anew.

        Args:
            key: cache key of the graph.
            graph: its name, for messages and the manifest.
            load: turns a blob into an executable.
            compile_: makes the executable and its blob. Whatever it raises is passed on and leaves no entry.
        """
        if self._store is None:
            return compile_()[0]
        found = self.fetch(key, load)
        if found is not None:
            return found
        with self._locked(key, graph):
            try:
                found = self._read(key, load)
            except CorruptEntryError as error:
                logger.warning("Compile cache: removing the entry of %s (%s): %s", graph, key, error)
                self._attempt(lambda: self._entries.remove(key))
            if found is not None:
                return found
            start = time.monotonic()
            compiled, blob = compile_()
            seconds = time.monotonic() - start
            self._attempt(lambda: self._entries.write(key, blob, graph, self._route, self._versions, seconds))
            return compiled

    def indexed_key(self, fingerprint: str) -> str | None:
        """The key that `note` was given for this fingerprint, in this process or another."""
        return self._attempt(lambda: self._entries.read_index(fingerprint)) if self._store is not None else None

    def note(self, fingerprint: str, key: str, graph: str) -> None:
        """Remember which key a fingerprint leads to, so that a later start need not trace to find out."""
        if self._store is not None:
            self._attempt(lambda: self._entries.write_index(fingerprint, key, graph))

    @property
    def _entries(self) -> EntryStore:
        assert self._store is not None
        return self._store

    def _read(self, key: str, load: Load[T]) -> T | None:
        blob = self._attempt(lambda: self._entries.read(key))
        if blob is None:
            return None
        try:
            return load(blob)
        except ValueError as error:
            raise CorruptEntryError(f"{self._route} cannot load it: {error}") from error

    def _attempt(self, operation: Callable[[], T]) -> T | None:
        """The operation's result, or None and one warning per process if the file system does not let it."""
        try:
            return operation()
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "Compile cache %s cannot be used fully (%s). Graphs that are not in it are compiled at every "
                    "start; set VLLM_CACHE_ROOT to a folder that this user can write to.",
                    self._entries.folder,
                    error,
                )
            return None

    @contextmanager
    def _locked(self, key: str, graph: str) -> Iterator[None]:
        """Hold the key's lock. The kernel frees it when its owner dies, so waiting always ends."""
        lock = FileLock(self._entries.lock_path(key))
        if self._attempt(lambda: self._acquire(lock, graph)):
            try:
                yield
            finally:
                lock.release()
        else:
            yield

    def _acquire(self, lock: FileLock, graph: str) -> bool:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                lock.acquire(timeout=_WAIT_MESSAGE_SECONDS, poll_interval=0.1)
                return True
            except Timeout:
                logger.info("Waiting for another process that is compiling %s (lock %s)", graph, lock.lock_file)
