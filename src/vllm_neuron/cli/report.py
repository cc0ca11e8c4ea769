"""What `vllm-neuron doctor` finds out about this machine. Nothing is printed and nothing is changed here."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import vllm_neuron
from vllm_neuron import envs
from vllm_neuron.cli.versions import NEURON, RUNTIME, Package, package
from vllm_neuron.compilation.cache import local_cache_root
from vllm_neuron.config.resolved import ResolvedConfig

if TYPE_CHECKING:
    from vllm_neuron.kernels.dispatch import Choice


@dataclass(frozen=True)
class Platform:
    """Whether vLLM will choose this plugin's platform.

    Attributes:
        active: it will.
        mode: "cpu" or "neuron"; what the environment asks for, whether or not the platform is active.
        reasons: what the plugin says for itself.
    """

    active: bool
    mode: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class RouteReport:
    """A compile route on this machine: whether it is the selected one, whether it works, and why (not)."""

    name: str
    selected: bool
    works: bool
    reason: str
    versions: dict[str, str]


@dataclass(frozen=True)
class CacheFolder:
    """The compile cache.

    Attributes:
        path: of the folder.
        exists: it does.
        writable: it, or the nearest folder above it that exists, can be written to.
        entries: compiled graphs in it.
        num_bytes: size of all its files.
    """

    path: str
    exists: bool
    writable: bool
    entries: int
    num_bytes: int


@dataclass(frozen=True)
class Report:
    """Everything; `healthy` is that the selected route works."""

    platform: Platform
    packages: tuple[Package, ...]
    routes: tuple[RouteReport, ...]
    devices: tuple[str, ...]
    kernels: "tuple[Choice, ...]"
    cache: CacheFolder
    environment: tuple[envs.Effective, ...]
    warnings: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        return self.platform.active and any(route.selected and route.works for route in self.routes)


def gather() -> Report:
    """Look at everything once."""
    return Report(
        platform=platform(),
        packages=tuple(package(name) for name in (*RUNTIME, *NEURON)),
        routes=routes(),
        devices=devices(),
        kernels=kernels(),
        cache=cache_folder(),
        environment=tuple(envs.effective()),
        warnings=environment_warnings(),
    )


def platform() -> Platform:
    """Ask the plugin itself, as vLLM does, and keep what it logs."""
    allowed = os.environ.get("VLLM_PLUGINS")
    mode = "cpu" if _value("VLLM_NEURON_CPU_MODE") else "neuron"
    if allowed is not None and "neuron" not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading this plugin: add neuron to it, or unset it."
        return Platform(False, mode, (text,))
    with _messages() as reasons:
        try:
            chosen = vllm_neuron.register()
        except SystemExit:  # the plugin has logged the cause
            chosen = None
    if chosen is not None:
        reasons.append("VLLM_NEURON_CPU_MODE=1 asks for it" if mode == "cpu" else "Neuron devices or CPU compile mode")
    return Platform(chosen is not None, mode, tuple(dict.fromkeys(reasons)))


def routes() -> tuple[RouteReport, ...]:
    """Probe every route."""
    from vllm_neuron.plugin.hardware import compile_target
    from vllm_neuron.routes.select import select_route

    selected = _value("VLLM_NEURON_BACKEND")
    try:
        target = compile_target(_choices())
    except RuntimeError as error:
        return tuple(RouteReport(name, name == selected, False, str(error), {}) for name in envs.BACKENDS)
    reports = []
    for name in envs.BACKENDS:
        with _messages():
            probe = select_route(name, target).probe()
        reports.append(RouteReport(name, name == selected, probe.works, probe.reason, dict(probe.versions)))
    return tuple(reports)


def devices() -> tuple[str, ...]:
    """Device files of Neuron accelerators."""
    return tuple(sorted(str(path) for path in Path("/dev").glob("neuron[0-9]*")))


def kernels() -> "tuple[Choice, ...]":
    """What computes each op in the graphs of the environment's backend and mode."""
    from vllm_neuron.engine.compiler import kernels_of
    from vllm_neuron.kernels.dispatch import choices

    return choices(kernels_of(_choices()))


def _choices() -> ResolvedConfig:
    """What the environment decides of a configuration. All of it needs a model, which the doctor has not."""
    compile_only = bool(_value("VLLM_NEURON_CPU_COMPILE"))
    fields = SimpleNamespace(
        backend=_value("VLLM_NEURON_BACKEND"),
        cpu_mode=bool(_value("VLLM_NEURON_CPU_MODE")),
        disable_nki_kernels=bool(_value("VLLM_NEURON_DISABLE_NKI_KERNELS")),
        nki_simulator=bool(_value("NKI_SIMULATOR")),
        attn_mask_torch=bool(_value("VLLM_NEURON_ATTN_MASK_TORCH")),
        platform_target=_value("NEURON_PLATFORM_TARGET_OVERRIDE") if compile_only else None,
    )
    return cast(ResolvedConfig, fields)


def cache_folder() -> CacheFolder:
    """Size up the compile cache without creating it."""
    path = local_cache_root()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    entries = sum(1 for _ in path.glob("*/*/manifest.json"))
    return CacheFolder(str(path), path.is_dir(), os.access(nearest, os.W_OK), entries, sum(sizes))


def environment_warnings() -> tuple[str, ...]:
    """Variables with bad values, unknown ones, and the like."""
    faults = (_fault(name) for name in envs.VARIABLES)
    return (*filter(None, faults), *envs.warnings())


def _value(name: str) -> Any:
    """A variable's value; its default where it holds nonsense, which the report's warnings tell."""
    try:
        return envs.read(name)
    except envs.EnvironmentVariableError:
        return envs.default(envs.VARIABLES[name])


def _fault(name: str) -> str | None:
    try:
        envs.read(name)
    except envs.EnvironmentVariableError as error:
        return str(error)
    return None


class _Collector(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.INFO)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(record.getMessage())


@contextmanager
def _messages() -> Iterator[list[str]]:
    """What the plugin logs or warns about inside the block, which goes nowhere else."""
    found: list[str] = []
    logger = logging.getLogger("vllm_neuron")
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [_Collector(found)], False
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        found += [str(warning.message) for warning in caught]
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])
