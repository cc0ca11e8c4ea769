"""A folder of compiled graphs.

Layout, for the folder of one route:

    <key>/blob              what the route saved
    <key>/manifest.json     graph name, key, route, versions, size and SHA-256 of the blob, seconds it took to compile
    index/<fingerprint>     JSON: the key that a graph's fingerprint led to last time
    locks/<key>.lock        held while a process compiles the graph; a lock file that nobody holds means nothing

An entry appears whole or not at all: it is written aside and renamed into place.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


class CorruptEntryError(Exception):
    """An entry is there but is not what was once written."""


@dataclass(frozen=True)
class Manifest:
    """What an entry says about itself.

    Attributes:
        graph: name of the graph.
        key: its cache key, which is the name of its folder too.
        route: name of the route that compiled it.
        versions: versions that route reported.
        num_bytes: size of the blob.
        sha256: digest of the blob.
        compile_seconds: how long compiling took.
    """

    graph: str
    key: str
    route: str
    versions: Mapping[str, str]
    num_bytes: int
    sha256: str
    compile_seconds: float


class EntryStore:
    """Reads and writes entries of one folder; knows nothing of locks and policies.

    Every method raises OSError where the folder cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lock_path(self, key: str) -> Path:
        return self.folder / "locks" / f"{key}.lock"

    def read(self, key: str) -> bytes | None:
        """The blob of an entry, checked against its manifest; None if there is no such entry.

        Raises:
            CorruptEntryError: the entry is incomplete, damaged, or another graph's.
        """
        entry = self.folder / key
        if not entry.is_dir():
            return None
        try:
            manifest = Manifest(**json.loads((entry / "manifest.json").read_bytes()))
            blob = (entry / "blob").read_bytes()
        except FileNotFoundError as error:
            raise CorruptEntryError(f"{Path(error.filename).name} is missing") from error
        except (ValueError, TypeError) as error:
            raise CorruptEntryError(f"manifest.json is damaged ({error})") from error
        if manifest.key != key:
            raise CorruptEntryError(f"it holds graph {manifest.graph} of key {manifest.key}")
        if len(blob) != manifest.num_bytes or hashlib.sha256(blob).hexdigest() != manifest.sha256:
            raise CorruptEntryError(f"blob of graph {manifest.graph} does not match its checksum")
        return blob

    def write(
        self, key: str, blob: bytes, graph: str, route: str, versions: Mapping[str, str], compile_seconds: float
    ) -> None:
        """Add an entry. If another process added the same one meanwhile, that one stays."""
        self._remove_leftovers(key)
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=self.folder))
        try:
            manifest = Manifest(
                graph, key, route, versions, len(blob), hashlib.sha256(blob).hexdigest(), round(compile_seconds, 3)
            )
            (aside / "blob").write_bytes(blob)
            (aside / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n")
            aside.chmod(0o755)
            try:
                aside.rename(self.folder / key)
            except OSError:
                if not (self.folder / key).is_dir():
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def remove(self, key: str) -> None:
        shutil.rmtree(self.folder / key)

    def read_index(self, fingerprint: str) -> str | None:
        """The key noted for a fingerprint; None if there is none that can be read."""
        try:
            noted = json.loads((self.folder / "index" / fingerprint).read_bytes())
            return str(noted["key"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write_index(self, fingerprint: str, key: str, graph: str) -> None:
        index = self.folder / "index"
        index.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(prefix=f".{fingerprint}.", dir=index)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"graph": graph, "key": key}, file)
        os.chmod(aside, 0o644)
        os.replace(aside, index / fingerprint)

    def _remove_leftovers(self, key: str) -> None:
        """What processes that died while writing this entry have left; the caller holds the entry's lock."""
        for leftover in self.folder.glob(f".{key}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
