"""A folder of compiled graphs.

Layout, for the folder of one route:

    <key>/blob              what the route saved
    <key>/manifest.json     graph, model, key and its parts, size and SHA-256 of the blob, seconds it took to compile
    index/<fingerprint>     JSON: the key that a graph's fingerprint led to last time
    locks/<key>.lock        held while a process compiles the graph; a lock file that nobody holds means nothing

An entry appears whole or not at all: it is written aside and renamed into place.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_neuron.compilation.files import write_whole

_KEY = re.compile(r"[0-9a-f]{64}")
_LEFTOVER = re.compile(r"\.[0-9a-f]{64}\.")
_SEPARATE = ("index", "locks", "logs")


class CorruptEntryError(Exception):
    """An entry is there but is not what was once written."""


@dataclass(frozen=True)
class Manifest:
    """What an entry says about itself.

    Attributes:
        graph: name of the graph.
        model: architecture it belongs to.
        key: its cache key, which is the name of its folder too.
        parts: what the key is made of; see `GraphKey`.
        num_bytes: size of the blob.
        sha256: digest of the blob.
        compile_seconds: how long compiling took.
    """

    graph: str
    model: str
    key: str
    parts: Mapping[str, Any]
    num_bytes: int
    sha256: str
    compile_seconds: float

    @classmethod
    def of(cls, blob: bytes, graph: str, model: str, key: str, parts: Mapping[str, Any], seconds: float) -> "Manifest":
        """The manifest of a blob that took ``seconds`` to compile."""
        return cls(graph, model, key, parts, len(blob), hashlib.sha256(blob).hexdigest(), round(seconds, 3))


class Entry(NamedTuple):
    """A compiled graph as it lies in a folder."""

    manifest: Manifest
    blob: bytes


class Found(NamedTuple):
    """Something in a folder that has a key's name, or should have.

    Attributes:
        path: where it is.
        manifest: what it says of itself, or None if that cannot be read.
        num_bytes: what all of it takes on the disk.
        used: when it was last read or written, in seconds since the epoch.
    """

    path: Path
    manifest: Manifest | None
    num_bytes: int
    used: float

    @property
    def key(self) -> str | None:
        """The key that is its name; None for something foreign."""
        return self.path.name if _KEY.fullmatch(self.path.name) and self.path.is_dir() else None


class EntryStore:
    """Reads and writes entries of one folder; knows nothing of locks and policies.

    Every method raises OSError where the folder cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, key: str) -> bool:
        """Whether there is an entry of this key, be it damaged."""
        return (self.folder / key).is_dir()

    def has_entries(self) -> bool:
        """Whether there is any entry."""
        return self.folder.is_dir() and any(_KEY.fullmatch(path.name) for path in self.folder.iterdir())

    def manifest(self, key: str) -> Manifest:
        """What the entry of this key says of itself.

        Raises:
            CorruptEntryError: there is none, it cannot be read, or it is another graph's.
        """
        try:
            manifest = Manifest(**json.loads((self.folder / key / "manifest.json").read_bytes()))
        except FileNotFoundError as error:
            raise CorruptEntryError("manifest.json is missing") from error
        except (ValueError, TypeError) as error:
            raise CorruptEntryError(f"manifest.json is damaged or of another version ({error})") from error
        if manifest.key != key:
            raise CorruptEntryError(f"it holds graph {manifest.graph} of key {manifest.key}")
        return manifest

    def looks_whole(self, key: str) -> bool:
        """Whether there is an entry of this key whose blob has the size that its manifest tells."""
        try:
            return (self.folder / key / "blob").stat().st_size == self.manifest(key).num_bytes
        except (CorruptEntryError, FileNotFoundError, NotADirectoryError):
            return False

    def read(self, key: str) -> Entry | None:
        """An entry, its blob checked against its manifest; None if there is no such entry. Counts as a use of it.

        Raises:
            CorruptEntryError: the entry is incomplete, damaged, or another graph's.
        """
        if not self.has(key):
            return None
        entry = self.check(key)
        with suppress(OSError):
            # When it was last used, for cleaning up.
            os.utime(self.folder / key / "manifest.json")
        return entry

    def check(self, key: str) -> Entry:
        """The entry of this key, its blob checked against its manifest. Does not count as a use of it.

        Raises:
            CorruptEntryError: there is none, or it is incomplete, damaged, or another graph's.
        """
        manifest = self.manifest(key)
        try:
            blob = (self.folder / key / "blob").read_bytes()
        except FileNotFoundError as error:
            raise CorruptEntryError("blob is missing") from error
        if len(blob) != manifest.num_bytes or hashlib.sha256(blob).hexdigest() != manifest.sha256:
            raise CorruptEntryError(f"blob of graph {manifest.graph} does not match its checksum")
        return Entry(manifest, blob)

    def write(self, entry: Entry) -> None:
        """Add an entry. If another process added the same one meanwhile, that one stays."""
        key = entry.manifest.key
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=self.folder))
        try:
            (aside / "blob").write_bytes(entry.blob)
            text = json.dumps(asdict(entry.manifest), indent=1, sort_keys=True)
            (aside / "manifest.json").write_text(text + "\n")
            aside.chmod(0o755)
            try:
                aside.rename(self.folder / key)
            except OSError:
                if not self.has(key):
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def remove(self, key: str) -> None:
        """Remove an entry. It disappears at once: a reader finds all of it or none."""
        aside = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=self.folder))
        try:
            with suppress(FileNotFoundError):
                (self.folder / key).rename(aside / "entry")
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def remove_leftovers(self, key: str) -> None:
        """Remove what processes that died while writing this entry have left.

        Only for a folder whose writers all hold the entry's lock, as the caller does: another may be writing it else.
        """
        for leftover in self.folder.glob(f".{key}.*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def entries(self) -> Iterator[Found]:
        """Everything in the folder that is or should be an entry, and what is foreign, in the order of names."""
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            if path.name.startswith(".") or path.name in _SEPARATE:
                continue
            manifest = None
            if _KEY.fullmatch(path.name):
                with suppress(CorruptEntryError, NotADirectoryError):
                    manifest = self.manifest(path.name)
            yield _found(path, manifest)

    def leftovers(self, older_than: float) -> Iterator[Found]:
        """What processes that died while writing or removing entries have left, in the order of names.

        Args:
            older_than: seconds since it was last written to. What is younger may belong to a process that lives.
        """
        for path in sorted(self.folder.glob(".*")):
            if _LEFTOVER.match(path.name) and path.is_dir():
                found = _found(path, None)
                if time.time() - found.used > older_than:
                    yield found

    def dangling_index(self, without: Collection[str] = ()) -> Iterator[Path]:
        """Index files that lead to no entry of this folder, or to one of the keys ``without``."""
        for path in sorted((self.folder / "index").glob("*")):
            key = self.read_index(path.name)
            if key is None or key in without or not self.has(key):
                yield path

    def read_index(self, fingerprint: str) -> str | None:
        """The key noted for a fingerprint; None if there is none that can be read."""
        try:
            noted = json.loads((self.folder / "index" / fingerprint).read_bytes())
            return str(noted["key"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write_index(self, fingerprint: str, key: str, graph: str) -> None:
        """Note the key that a fingerprint led to, and the graph's name for whoever looks."""
        index = self.folder / "index"
        index.mkdir(parents=True, exist_ok=True)
        write_whole(index / fingerprint, json.dumps({"graph": graph, "key": key}))


def _found(path: Path, manifest: Manifest | None) -> Found:
    num_bytes, used = 0, 0.0
    # Another process may be removing it at this moment.
    with suppress(FileNotFoundError):
        used = path.stat().st_mtime
        files = [file.stat() for file in path.rglob("*") if file.is_file()]
        num_bytes, used = sum(file.st_size for file in files), max((file.st_mtime for file in files), default=used)
    return Found(path, manifest, num_bytes, used)
