"""What two cache keys differ in, in words."""

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from vllm_neuron.compilation.store import Manifest

_HASH_DIGITS = 12
_SHOWN_ARGUMENTS = 3


def differences(parts: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """One line per part of a key that differs: its name, the value here and the value there."""
    lines = []
    for name in sorted({*parts, *others}):
        here, there = parts.get(name), others.get(name)
        if here == there:
            continue
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            lines += [
                f"{name}.{item}: {_shown(here.get(item))} here, {_shown(there.get(item))} there"
                for item in sorted({*here, *there})
                if here.get(item) != there.get(item)
            ]
        elif isinstance(here, list) and isinstance(there, list):
            lines += _lists(name, here, there)
        else:
            lines.append(f"{name}: {_shown(here)} here, {_shown(there)} there")
    return lines


def nearest(parts: Mapping[str, Any], graph: str, manifests: Iterable[Manifest]) -> tuple[Manifest, list[str]] | None:
    """The manifest that is nearest, and the parts of its key that differ; None if there is none.

    The more of the beginning of its graph's name is the same, the nearer it is: decode_b4 is nearer to decode_b2 than
    any prefill. Among equals the one with the fewest differing parts is.
    """
    candidates = [(manifest, differences(parts, manifest.parts)) for manifest in manifests]

    def distance(found: tuple[Manifest, list[str]]) -> tuple[int, int]:
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(found[0].graph, graph, strict=False))
        return -len(list(alike)), len(found[1])

    return min(candidates, key=distance, default=None)


def _lists(name: str, here: list[Any], there: list[Any]) -> list[str]:
    only_here = [item for item in here if item not in there]
    only_there = [item for item in there if item not in here]
    lines = [f"{name}: {item} only here" for item in only_here[:_SHOWN_ARGUMENTS]]
    lines += [f"{name}: {item} only there" for item in only_there[:_SHOWN_ARGUMENTS]]
    more = max(0, len(only_here) - _SHOWN_ARGUMENTS) + max(0, len(only_there) - _SHOWN_ARGUMENTS)
    return [*lines, f"{name}: {more} more differ"] if more else lines


def _shown(value: Any) -> str:
    text = str(value)
    return text[:_HASH_DIGITS] if len(text) == 64 else text
