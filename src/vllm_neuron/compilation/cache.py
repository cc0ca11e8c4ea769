"""The compile cache: each graph is compiled once, however many processes and machines want it.

It has up to three tiers, which are asked in this order:

    artifacts     NEURON_COMPILED_ARTIFACTS, carried along with a model; filled if it was empty or lacks a graph
    local         a folder of this machine, under VLLM_CACHE_ROOT; locks lie here
    remote        NEURON_LIBTORCH_REMOTE_CACHE, shared by many machines

What is compiled is written to all of them, and what one tier has is copied to those before it that lack it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from filelock import FileLock, Timeout

from vllm_neuron import envs
from vllm_neuron.compilation.explain import nearest
from vllm_neuron.compilation.key import GraphKey
from vllm_neuron.compilation.locks import lock_folder
from vllm_neuron.compilation.store import CorruptEntryError, Entry, EntryStore, Manifest

logger = logging.getLogger(__name__)

T = TypeVar("T")

Load = Callable[[bytes], T]
"""Turns a blob into what it was saved from; ValueError if it cannot."""

TierName = Literal["artifacts", "local", "remote"]
Source = Literal["artifacts", "local", "remote", "compiled"]
"""Where an executable came from: a tier of the cache, or the compiler."""

_WAIT_MESSAGE_SECONDS = 30.0
_REMEDIES: dict[TierName, str] = {
    "local": "Graphs that are not in it are compiled at every start; set VLLM_CACHE_ROOT to a folder that this user "
    "can write to",
    "artifacts": "What is in it is used; graphs that it lacks are not added. Make NEURON_COMPILED_ARTIFACTS writable, "
    "or fill it with vllm-neuron compile for this configuration",
    "remote": "It is passed over where it fails; check NEURON_LIBTORCH_REMOTE_CACHE and its permissions",
}


def local_cache_root() -> Path:
    """The folder of all routes' entries: ``$VLLM_CACHE_ROOT/neuron/compile_cache``."""
    return Path(envs.VLLM_CACHE_ROOT).expanduser() / "neuron" / "compile_cache"


@dataclass(frozen=True)
class CacheFolders:
    """Where compiled graphs are kept, a folder with a subfolder per route each; None is a tier that is not used."""

    local: Path | None = None
    artifacts: Path | None = None
    remote: Path | None = None


class Kept(NamedTuple, Generic[T]):
    """An executable, where it came from, and what its entry says of itself."""

    value: T
    source: Source
    manifest: Manifest


class _Tier(NamedTuple):
    name: TierName
    store: EntryStore


class CompileCache:
    """Compiled graphs of one route.

    Nothing about the cache can stop a start: where a tier cannot be read or written, one WARNING says so and the next
    is asked, and if there is none left the graph is compiled.

    Args:
        folders: the tiers; without any nothing is read or written.
        route: name of the route.

    Attributes:
        folders: the same.
        reads_artifacts: there were artifacts of this route from the start, so that their graphs are expected to fit.
    """

    def __init__(self, folders: CacheFolders, route: str) -> None:
        self.folders = folders
        named: tuple[tuple[TierName, Path | None], ...] = (
            ("artifacts", folders.artifacts),
            ("local", folders.local),
            ("remote", folders.remote),
        )
        self._tiers = [_Tier(name, EntryStore(folder / route)) for name, folder in named if folder is not None]
        self._local = next((tier for tier in self._tiers if tier.name == "local"), None)
        self._route = route
        self._warned: set[str] = set()
        self._warning = threading.Lock()
        artifacts = [tier for tier in self._tiers if tier.name == "artifacts"]
        self.reads_artifacts = any(self._attempt(tier, tier.store.has_entries) for tier in artifacts)

    def fetch(self, key: str, load: Load[T]) -> Kept[T] | None:
        """The entry of this key, or None if no tier has one that works."""
        return self._fetch(key, load, locked=False)

    def has(self, key: str) -> bool:
        """Whether a tier has an entry of this key that looks whole; its checksum is not looked at."""
        return any(self._attempt(tier, tier.store.looks_whole, key) for tier in self._tiers)

    def get_or_compile(
        self, key: GraphKey, graph: str, model: str, load: Load[T], compile_: Callable[[], tuple[T, bytes]]
    ) -> Kept[T]:
        """The entry of this key; compiled by ``compile_`` and stored if there is none.

        Only one process of a machine compiles a key at a time, and those that waited for it take its entry. A damaged
        entry is reported and made anew.

        Args:
            key: cache key of the graph.
            graph: its name, for messages and the manifest.
            model: architecture it belongs to, for the manifest.
            load: turns a blob into an executable.
            compile_: makes the executable and its blob. Whatever it raises is passed on and leaves no entry.
        """
        found = self.fetch(key.digest, load)
        if found is not None:
            return found
        with self._locked(key.digest, graph):
            found = self._fetch(key.digest, load, locked=True)
            if found is not None:
                return found
            start = time.monotonic()
            value, blob = compile_()
            seconds = time.monotonic() - start
            manifest = Manifest.of(blob, graph, model, key.digest, key.parts(), seconds)
            self._write(Entry(manifest, blob), self._tiers)
            return Kept(value, "compiled", manifest)

    def indexed_key(self, fingerprint: str) -> str | None:
        """The key that `note` was given for this fingerprint, in this process or another."""
        for tier in self._tiers:
            key = self._attempt(tier, tier.store.read_index, fingerprint)
            if key is not None:
                return key
        return None

    def note(self, fingerprint: str, key: str, graph: str) -> None:
        """Remember which key a fingerprint leads to, so that a later start need not trace to find out."""
        for tier in self._tiers:
            if self._attempt(tier, tier.store.read_index, fingerprint) != key:
                self._attempt(tier, tier.store.write_index, fingerprint, key, graph)

    def why_missing(self, key: GraphKey, graph: str) -> str:
        """What a graph that no tier has differs in from the nearest one that is there, in one line."""
        manifests = [
            found.manifest
            for tier in self._tiers
            for found in self._attempt(tier, lambda store: list(store.entries()), tier.store) or ()
            if found.manifest is not None
        ]
        names = ", ".join(f"{tier.name} {tier.store.folder}" for tier in self._tiers) or "none"
        best = nearest(key.parts(), graph, manifests)
        if best is None:
            return f"There is no graph of this route yet (looked in: {names})."
        manifest, lines = best
        what = f"The nearest graph there is {manifest.graph} ({manifest.key[:12]})"
        return f"{what}: {'; '.join(lines)}. Looked in: {names}."

    def _fetch(self, key: str, load: Load[T], locked: bool) -> Kept[T] | None:
        """`fetch`; a damaged entry of the local tier is removed if the caller holds the key's lock."""
        for tier in self._tiers:
            try:
                entry = self._attempt(tier, tier.store.read, key)
                if entry is None:
                    continue
                value = _loaded(entry, load, self._route)
            except CorruptEntryError as error:
                self._report_corrupt(tier, key, error, locked)
                continue
            self._write(entry, self._tiers[: self._tiers.index(tier)])
            return Kept(value, tier.name, entry.manifest)
        return None

    def _report_corrupt(self, tier: _Tier, key: str, error: CorruptEntryError, locked: bool) -> None:
        """Name a damaged entry, and where it is our own take it away."""
        path = tier.store.folder / key
        if tier.name != "local":
            self._warn_once(
                str(path),
                "Compile cache (%s): passing over %s: %s. Remove it to have it made anew.",
                tier.name,
                path,
                error,
            )
        elif locked:
            logger.warning("Compile cache: removing the entry %s: %s", path, error)
            self._attempt(tier, tier.store.remove, key)

    def _write(self, entry: Entry, tiers: list[_Tier]) -> None:
        """Add an entry to those tiers that lack it."""
        for tier in tiers:
            if not tier.store.has(entry.manifest.key):
                self._attempt(tier, tier.store.write, entry)

    def _attempt(self, tier: _Tier, operation: Callable[..., T], *arguments: Any) -> T | None:
        """The operation's result, or None and one warning per tier and process if the file system does not let it."""
        try:
            return operation(*arguments)
        except OSError as error:
            self._warn_once(
                tier.name,
                "Compile cache (%s) %s cannot be used fully (%s). %s.",
                tier.name,
                tier.store.folder,
                error,
                _REMEDIES[tier.name],
            )
            return None

    def _warn_once(self, about: str, message: str, *arguments: Any) -> None:
        with self._warning:
            if about in self._warned:
                return
            self._warned.add(about)
        logger.warning(message, *arguments)

    @contextmanager
    def _locked(self, key: str, graph: str) -> Iterator[None]:
        """Hold the key's lock. The kernel frees it when its owner dies, so waiting always ends."""
        if self._local is None:
            yield
            return
        lock = FileLock(lock_folder(self._local.store.folder) / f"{key}.lock")
        if self._attempt(self._local, self._acquire, lock, graph):
            try:
                self._attempt(self._local, self._local.store.remove_leftovers, key)
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


def _loaded(entry: Entry, load: Load[T], route: str) -> T:
    try:
        return load(entry.blob)
    except ValueError as error:
        raise CorruptEntryError(f"{route} cannot load it: {error}") from error
