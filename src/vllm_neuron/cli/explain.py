"""`vllm-neuron compile --explain`: what a key is made of, and what the nearest other one differs in."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_neuron import envs
from vllm_neuron.cli.errors import CommandError
from vllm_neuron.cli.tables import FEWEST_DIGITS, SHOWN_DIGITS, megabytes, new_table
from vllm_neuron.compilation.cache import local_cache_root
from vllm_neuron.compilation.explain import nearest
from vllm_neuron.compilation.store import EntryStore, Manifest

_SHOWN_ARGUMENTS = 3


@dataclass(frozen=True)
class Explanation:
    """An entry, where it lies, and its nearest other one.

    Attributes:
        manifest: of the entry.
        folders: each folder of the route that has the entry, by the name of its tier.
        neighbour: the other entry with the fewest differing parts; None if there is no other.
        lines: what differs, a line each: the value here and the value there.
    """

    manifest: Manifest
    folders: Mapping[str, Path]
    neighbour: Manifest | None
    lines: tuple[str, ...]


def explain(prefix: str) -> Explanation:
    """Look a key up in the tiers of the selected route.

    Args:
        prefix: a key, or its first digits, FEWEST_DIGITS at least.

    Raises:
        CommandError: there is no such key, or more than one.
    """
    tiers = _tiers(envs.VLLM_NEURON_BACKEND)
    found = {
        name: {found.manifest.key: found.manifest for found in store.entries() if found.manifest is not None}
        for name, store in tiers.items()
    }
    manifests: dict[str, Manifest] = {}
    for entries in found.values():
        manifests |= entries
    if len(prefix) < FEWEST_DIGITS:
        raise CommandError(f"--explain={prefix}: give {FEWEST_DIGITS} or more digits of a key.")
    keys = [key for key in manifests if key.startswith(prefix.lower())]
    if len(keys) != 1:
        places = ", ".join(f"{name} {store.folder}" for name, store in tiers.items())
        what = f"{len(keys)} graphs have keys that begin so" if keys else "no graph has such a key"
        remedy = "Give more digits" if keys else "List the keys with vllm-neuron cache ls"
        raise CommandError(f"--explain={prefix}: {what} (looked in: {places}). {remedy}.")
    manifest = manifests.pop(keys[0])
    folders = {name: tiers[name].folder for name, entries in found.items() if manifest.key in entries}
    neighbour, lines = nearest(manifest.parts, manifest.graph, manifests.values()) or (None, [])
    return Explanation(manifest, folders, neighbour, tuple(lines))


def _tiers(route: str) -> dict[str, EntryStore]:
    folders = {
        "artifacts": envs.NEURON_COMPILED_ARTIFACTS,
        "local": local_cache_root(),
        "remote": envs.NEURON_LIBTORCH_REMOTE_CACHE,
    }
    return {name: EntryStore(Path(folder) / route) for name, folder in folders.items() if folder is not None}


def as_json(explanation: Explanation) -> str:
    """The explanation as one JSON object; all arguments are in it."""
    manifest, neighbour = explanation.manifest, explanation.neighbour
    document = {
        "key": manifest.key,
        "graph": manifest.graph,
        "model": manifest.model,
        "folders": {name: str(folder) for name, folder in explanation.folders.items()},
        "parts": manifest.parts,
        "nearest": neighbour and {"key": neighbour.key, "graph": neighbour.graph},
        "differences": list(explanation.lines),
    }
    return json.dumps(document, indent=2)


def show(explanation: Explanation, console: Console) -> None:
    """Print the explanation for people."""
    manifest = explanation.manifest
    console.print(f"{manifest.key}: {manifest.graph} of {escape(manifest.model)}")
    for name, folder in explanation.folders.items():
        console.print(f"  {name}: {escape(str(folder))}")
    console.print(f"  {megabytes(manifest.num_bytes)} MB, compiled in {manifest.compile_seconds:.2f} s")
    table = new_table("part", "value")
    for name, value in manifest.parts.items():
        for line in _lines(value):
            table.add_row(name, escape(line))
            name = ""
    console.print(table)
    if explanation.neighbour is None:
        console.print("There is no other graph of this route to compare it with.")
        return
    neighbour = explanation.neighbour
    console.print(f"The nearest other graph is {neighbour.graph} ({neighbour.key[:SHOWN_DIGITS]}). It differs in:")
    for line in explanation.lines:
        console.print(f"  {escape(line)}")


def _lines(value: Any) -> list[str]:
    """A part of a key, a line per item; of a long list the first few."""
    if isinstance(value, Mapping):
        return [f"{name}: {item}" for name, item in value.items()] or ["none"]
    if isinstance(value, list):
        rest = len(value) - _SHOWN_ARGUMENTS
        more = [f"and {rest} more ({len(value)} in all)"] if rest > 0 else []
        return [*map(str, value[:_SHOWN_ARGUMENTS]), *more] or ["none"]
    return [str(value)]
