"""Cache keys: what a compiled graph depends on, and nothing else.

A key is a SHA-256 over canonical JSON. It holds no path, port, process id or hash seed, so equal inputs give equal keys
on every start and every machine of the same kind.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

TRACED_PACKAGES = ("vllm_neuron", "vllm_neuron.kernels", "vllm_neuron.routes")
"""Packages whose sources decide what tracing yields."""

_COMPILER_FLAGS = ("XLA_FLAGS", "NEURON_CC_FLAGS")
"""Not settings of ours: the compilers look at them by themselves."""

_NOT_SOURCES = (".pyc", ".so", ".o")


@dataclass(frozen=True)
class GraphKey:
    """What a compiled graph is made from. Two graphs with equal parts are the same graph.

    Attributes:
        graph: SHA-256 of the lowered graph's text, in which every constant stands.
        arguments: dtype, shape and stride of each argument.
        route: name of the route.
        target: what the code runs on: `host_target()`, "trn2", "trn3".
        parallel: degrees of parallelism, e.g. {"tensor": 1}.
        versions: of every package that lowers, compiles or loads.
        flags: of the compiler, those of the environment included; their order does not count.
        lowering: SHA-256 of the sources of the route.
        kernels: SHA-256 of the sources of the kernels that the graph calls, by package or module.
    """

    graph: str
    arguments: tuple[str, ...]
    route: str
    target: str
    parallel: Mapping[str, int]
    versions: Mapping[str, str]
    flags: tuple[str, ...]
    lowering: str
    kernels: Mapping[str, str]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits: the name of the graph's entry in a cache."""
        return _digest(**self.parts())

    def parts(self) -> dict[str, Any]:
        """The parts as JSON, as they are kept beside an entry."""
        parts = asdict(self)
        return {**parts, "arguments": list(self.arguments), "flags": list(self.flags)}


def graph_key(
    text: str,
    arguments: Iterable[str],
    route: str,
    target: str,
    versions: Mapping[str, str],
    parallel: Mapping[str, int],
    flags: Sequence[str] = (),
    modules: Sequence[str] = (),
    kernel_packages: Sequence[str] = (),
) -> GraphKey:
    """Key of a lowered graph.

    Args:
        text: the lowered graph.
        arguments: one line per argument: dtype, shape, stride.
        route: name of the route.
        target: what the code runs on.
        versions: the route's `versions()`; Python's is added.
        parallel: degrees of parallelism.
        flags: what the route hands to its compiler; `environment_flags()` are added.
        modules: modules whose sources decide how the route lowers.
        kernel_packages: packages and modules of the kernels that the graph calls by name.
    """
    return GraphKey(
        graph=hashlib.sha256(text.encode()).hexdigest(),
        arguments=tuple(arguments),
        route=route,
        target=target,
        parallel=dict(sorted(parallel.items())),
        versions=dict(sorted({**versions, "python": ".".join(platform.python_version_tuple()[:2])}.items())),
        flags=(*sorted(flags), *environment_flags()),
        lowering=module_digest(tuple(modules)),
        kernels={package: source_digest((package,)) for package in sorted(kernel_packages)},
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
        python=platform.python_version_tuple()[:2],
        versions=dict(versions),
        target=target,
        sources=source_digest(TRACED_PACKAGES),
        flags=environment_flags(),
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
    """Digest of all source files of these packages and their subpackages, by relative name and content.

    Of a module it is that of its file.
    """
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        folders = spec.submodule_search_locations if spec is not None else None
        if spec is None or not (folders or spec.origin):
            raise ModuleNotFoundError(f"no package or module {package!r}", name=package)
        digest.update((_tree_digest(Path(folders[0])) if folders else module_digest((package,))).encode())
    return digest.hexdigest()


def _tree_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in _NOT_SOURCES)
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in files):
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


@cache
def module_digest(modules: tuple[str, ...]) -> str:
    """Digest of the source files of these modules."""
    digest = hashlib.sha256()
    for module in sorted(modules):
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module {module!r}", name=module)
        digest.update(f"{module}\0{hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def environment_flags() -> list[str]:
    """Flags that compilers read from the environment themselves, sorted; those of one name stay in their order."""
    flags: list[str] = []
    for name in _COMPILER_FLAGS:
        first = len(flags)
        for word in os.environ.get(name, "").split():
            if word.startswith("-") or len(flags) == first:
                flags.append(f"{name}: {word}")
            else:
                flags[-1] += f" {word}"
    return sorted(flags, key=_flag_name)


def _flag_name(flag: str) -> str:
    """The flag without its value: of two with one name the later wins, so their order counts."""
    return " ".join(flag.partition("=")[0].split()[:2])


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
