"""Cache keys: what a compiled graph depends on, and nothing else.

A key is a SHA-256 over canonical JSON. It holds no path, port, process id or hash seed, so equal inputs give equal keys
on every start and every machine of the same kind.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

import torch

LOWERING_PACKAGES = ("vllm_neuron.kernels", "vllm_neuron.routes")
"""Packages whose sources shape compiled code without showing up in a graph's text, such as kernel bodies."""

TRACED_PACKAGES = ("vllm_neuron", *LOWERING_PACKAGES)
"""Packages whose sources decide what tracing yields."""

_COMPILER_FLAGS = ("XLA_FLAGS", "NEURON_CC_FLAGS")
"""Not settings of ours: the compilers look at them by themselves."""

_PYTHON = platform.python_version_tuple()[:2]
_NOT_SOURCES = (".pyc", ".so", ".o")


def graph_key(text: str, route: str, versions: Mapping[str, str], target: str) -> str:
    """Key of a compiled graph.

    Args:
        text: the lowered graph, which has every shape and dtype in it.
        route: name of the route.
        versions: the route's `versions()`.
        target: what the code runs on, e.g. `host_target()`.
    """
    return _digest(
        text=hashlib.sha256(text.encode()).hexdigest(),
        route=route,
        python=_PYTHON,
        versions=dict(versions),
        target=target,
        sources=source_digest(LOWERING_PACKAGES),
        flags=compiler_flags(),
    )


def trace_fingerprint(route: str, versions: Mapping[str, str], target: str, traced: object) -> str | None:
    """Key of what tracing and lowering would yield, known without doing either; None if it cannot be known.

    It covers the sources of the whole package, so any edit of ours makes it miss; a miss costs a trace, never more.

    Args:
        route: name of the route.
        versions: the route's `versions()`.
        target: what the code runs on.
        traced: everything that is handed to the trace, functions of the package included.
    """
    try:
        described = _describe(traced)
    except _UnknownValueError:
        return None
    return _digest(
        route=route,
        python=_PYTHON,
        versions=dict(versions),
        target=target,
        sources=source_digest(TRACED_PACKAGES),
        flags=compiler_flags(),
        traced=described,
    )


class _UnknownValueError(Exception):
    """A value that could differ in ways its description does not show."""


def _describe(value: object) -> object:
    """A value as JSON that differs whenever the value could make a trace differ."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Enum):
        return [kind, value.name]
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.Tensor):
        # Tensors are arguments of a graph: their values are no part of it.
        return [kind, list(value.shape), list(value.stride()), str(value.dtype)]
    if isinstance(value, Mapping):
        return [kind, [[_describe(key), _describe(item)] for key, item in sorted(value.items())]]
    if isinstance(value, tuple | list):
        return [kind, [_describe(item) for item in value]]
    if is_dataclass(value) and not isinstance(value, type):
        return [kind, {field.name: _describe(getattr(value, field.name)) for field in fields(value)}]
    if isinstance(value, partial):
        return [kind, _describe(value.func), _describe(value.args), _describe(value.keywords)]
    # A module-level function of the package: its source is in the source digest, and it has no captured variables.
    if isinstance(value, FunctionType) and value.__closure__ is None and value.__module__.startswith("vllm_neuron."):
        return [kind, value.__module__, value.__qualname__]
    raise _UnknownValueError(kind)


@cache
def source_digest(packages: tuple[str, ...]) -> str:
    """Digest of all source files of these packages and their subpackages, by relative name and content."""
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"no package {package!r}", name=package)
        digest.update(_tree_digest(Path(spec.submodule_search_locations[0])).encode())
    return digest.hexdigest()


def _tree_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in _NOT_SOURCES)
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in files):
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def compiler_flags() -> dict[str, str]:
    """Variables that compilers read themselves, those that are set; the order of flags does not count."""
    return {name: " ".join(sorted(os.environ[name].split())) for name in _COMPILER_FLAGS if os.environ.get(name)}


@cache
def host_target() -> str:
    """The kind of CPU that code compiled here may assume: machine type and instruction-set flags."""
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags.update(value.split())
    return f"{platform.machine()}-{hashlib.sha256(' '.join(sorted(flags)).encode()).hexdigest()[:16]}"


def _digest(**parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
