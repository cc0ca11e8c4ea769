"""`vllm-neuron cache`: what lies in a folder of compiled graphs, what of it is damaged, and what may go.

Works on a cache under VLLM_CACHE_ROOT as well as on folders that NEURON_COMPILED_ARTIFACTS or
NEURON_LIBTORCH_REMOTE_CACHE name: all have a subfolder per route. Servers may use the folder meanwhile: entries appear
and disappear as a whole, and locks are left alone.
"""

import json
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vllm_neuron import envs
from vllm_neuron.cli.errors import CommandError
from vllm_neuron.cli.tables import FEWEST_DIGITS, GB, SHOWN_DIGITS, megabytes, new_table
from vllm_neuron.compilation.artifacts import MARK
from vllm_neuron.compilation.cache import local_cache_root
from vllm_neuron.compilation.store import CorruptEntryError, EntryStore, Found

LEFTOVER_SECONDS = 3600
"""What is younger than this may still be written to."""

_DAY_SECONDS = 86400


@dataclass(frozen=True)
class Item:
    """An entry, or something in its place, in the folder of a route."""

    store: EntryStore
    found: Found

    @property
    def route(self) -> str:
        return self.store.folder.name

    @property
    def key(self) -> str:
        """The key; the name of something foreign."""
        return self.found.path.name


def root_of(folder: Path | None) -> Path:
    """The folder to work on; None is the local cache, which need not be there yet.

    Raises:
        CommandError: a folder was named and is not there.
    """
    if folder is None:
        return local_cache_root()
    if not folder.is_dir():
        raise CommandError(f"--folder={folder}: no such folder. Name one that has subfolders of routes.")
    return folder


def stores(root: Path) -> list[EntryStore]:
    """The routes that have graphs in a folder."""
    return [EntryStore(root / route) for route in envs.BACKENDS if (root / route).is_dir()]


def items(root: Path) -> list[Item]:
    """Entries, sound or damaged, of all routes."""
    return [Item(store, found) for store in stores(root) for found in store.entries() if found.key is not None]


def foreign(root: Path) -> list[Path]:
    """What is neither an entry nor anything else that belongs into such a folder. It is never touched."""
    top = [path for path in sorted(root.iterdir()) if path.name not in (*envs.BACKENDS, MARK)] if root.is_dir() else []
    return [*top, *(found.path for store in stores(root) for found in store.entries() if found.key is None)]


def list_as_json(root: Path) -> str:
    """All entries and foreign things as one JSON object."""
    entries = [
        {
            "route": item.route,
            "key": item.key,
            "graph": manifest and manifest.graph,
            "model": manifest and manifest.model,
            "bytes": item.found.num_bytes,
            "compile_seconds": manifest and manifest.compile_seconds,
            "used": item.found.used,
        }
        for item in items(root)
        for manifest in (item.found.manifest,)
    ]
    return json.dumps({"folder": str(root), "entries": entries, "foreign": list(map(str, foreign(root)))}, indent=2)


def show_list(root: Path, console: Console) -> None:
    """Print all entries, the last used one first, then what is foreign, then the total."""
    entries = sorted(items(root), key=lambda item: -item.found.used)
    if entries:
        _show(entries, console)
    for path in foreign(root):
        console.print(f"foreign: {escape(str(path))}")
    size = sum(item.found.num_bytes for item in entries)
    console.print(f"{len(entries)} graphs, {megabytes(size)} MB in {escape(str(root))}")


def remove(
    root: Path,
    console: Console,
    prefixes: Sequence[str] = (),
    everything: bool = False,
    older_than_days: float | None = None,
    max_size_gb: float | None = None,
    dry_run: bool = False,
) -> None:
    """Remove entries and what they leave without use: index files that lead nowhere, leftovers of dead processes.

    Args:
        root: folder of all routes.
        console: where to say what goes.
        prefixes: keys, or their first FEWEST_DIGITS digits or more.
        everything: all entries.
        older_than_days: entries that were last used longer ago than this many days.
        max_size_gb: the least recently used entries, until the others take no more than this many GB (10**9 bytes).
        dry_run: only say what would go.

    Raises:
        CommandError: not exactly one choice was made, or a prefix is not a key's or more than one's.
        OSError: the folder cannot be read or written to.
    """
    choices = [bool(prefixes), everything, older_than_days is not None, max_size_gb is not None]
    if sum(choices) != 1:
        raise CommandError("Say what to remove, in one way: KEY ..., --all, --older-than DAYS or --max-size GB.")
    entries = items(root)
    if prefixes:
        chosen = [_matching(entries, prefix) for prefix in prefixes]
    elif older_than_days is not None:
        limit = time.time() - older_than_days * _DAY_SECONDS
        chosen = [item for item in entries if item.found.used < limit]
    elif max_size_gb is not None:
        chosen = list(_beyond(entries, max_size_gb * GB))
    else:
        chosen = entries
    chosen = list({item.found.path: item for item in chosen}.values())
    if chosen:
        _show(chosen, console)
    index = [path for store in stores(root) for path in store.dangling_index(without=[item.key for item in chosen])]
    leftovers = [found for store in stores(root) for found in store.leftovers(LEFTOVER_SECONDS)]
    if not dry_run:
        for item in chosen:
            item.store.remove(item.key)
        for path in index:
            path.unlink(missing_ok=True)
        for found in leftovers:
            shutil.rmtree(found.path)
    size = sum(item.found.num_bytes for item in chosen) + sum(found.num_bytes for found in leftovers)
    console.print(
        f"{'would remove' if dry_run else 'removed'}: {len(chosen)} graphs, {len(leftovers)} leftovers, {len(index)} "
        f"index files; {megabytes(size)} MB"
    )


def verify(root: Path, console: Console, remove_damaged: bool = False) -> bool:
    """Check each entry's manifest and checksum, and name what is wrong.

    Args:
        root: folder of all routes.
        console: where to say it.
        remove_damaged: remove damaged entries, and what dead processes have left.

    Returns:
        Whether all entries are sound.

    Raises:
        OSError: the folder cannot be read or written to.
    """
    entries = items(root)
    damaged: list[Item] = []
    for item in entries:
        fault = _fault(item)
        if fault is not None:
            damaged.append(item)
            console.print(f"damaged: {escape(str(item.found.path))}: {escape(fault)}")
    leftovers = [found for store in stores(root) for found in store.leftovers(LEFTOVER_SECONDS)]
    for found in leftovers:
        console.print(f"leftover of a process that died: {escape(str(found.path))}")
    if remove_damaged:
        for item in damaged:
            item.store.remove(item.key)
        for found in leftovers:
            shutil.rmtree(found.path)
    done = " (removed)" if remove_damaged and (damaged or leftovers) else ""
    console.print(
        f"{len(entries)} graphs in {escape(str(root))}: {len(damaged)} damaged, {len(leftovers)} leftovers{done}"
    )
    return not damaged


def _fault(item: Item) -> str | None:
    try:
        item.store.check(item.key)
    except CorruptEntryError as error:
        # An entry that is gone was removed meanwhile.
        return str(error) if item.found.path.is_dir() else None
    return None


def _matching(entries: Collection[Item], prefix: str) -> Item:
    """The one entry whose key begins with these digits."""
    if len(prefix) < FEWEST_DIGITS:
        raise CommandError(f"{prefix}: give {FEWEST_DIGITS} or more digits of a key.")
    found = [item for item in entries if item.key.startswith(prefix.lower())]
    if len(found) != 1:
        what = f"{len(found)} graphs have keys that begin so. Give more digits" if found else "no graph has such a key"
        raise CommandError(f"{prefix}: {what}. List them with vllm-neuron cache ls.")
    return found[0]


def _beyond(entries: Sequence[Item], limit: float) -> Iterator[Item]:
    """The least recently used entries, until the others take no more than ``limit`` bytes."""
    size = sum(item.found.num_bytes for item in entries)
    for item in sorted(entries, key=lambda item: item.found.used):
        if size <= limit:
            return
        size -= item.found.num_bytes
        yield item


def _show(entries: Sequence[Item], console: Console) -> None:
    table = new_table("route", "graph", "model", "key", "MB", "compile s", "last used", numbers=("MB", "compile s"))
    for item in entries:
        found, manifest = item.found, item.found.manifest
        names = (manifest.graph, escape(manifest.model)) if manifest else ("damaged", "-")
        seconds = f"{manifest.compile_seconds:.2f}" if manifest else "-"
        used = datetime.fromtimestamp(found.used).strftime("%Y-%m-%d %H:%M")
        table.add_row(item.route, *names, item.key[:SHOWN_DIGITS], megabytes(found.num_bytes), seconds, used)
    console.print(table)
