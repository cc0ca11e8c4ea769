"""Every environment variable, in one table. Each access reads the environment anew, so nothing is frozen at import.

    from vllm_neuron import envs
    envs.VLLM_NEURON_CPU_MODE        # parsed value, or the default when unset
    envs.effective()                 # all of them, for printing

A variable that is empty or holds white space only counts as unset. Booleans are 1/0, true/false, yes/no or on/off.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

NATIVE = "neuron_native"
XLA = "vllm_neuron"
BACKENDS = (NATIVE, XLA)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TARGETS = ("trn2", "trn3")
_TARGET_ALIASES = {"gen3": "trn2", "gen4": "trn3"}
"""Names that Neuron's own tools take in NEURON_PLATFORM_TARGET_OVERRIDE, by generation of the NeuronCore."""

_OURS = ("VLLM_NEURON_", "NEURON_LIBTORCH_")
_RETIRED = {"VLLM_NEURON_FRAMEWORK": "The plugin registers itself with vLLM, so there is nothing to select"}


class EnvironmentVariableError(ValueError):
    """A variable holds a value that is not one of its allowed forms.

    Attributes:
        name: the variable.
        value: what it holds.
        allowed: its allowed forms, in words.
    """

    def __init__(self, name: str, value: str, allowed: str) -> None:
        super().__init__(f"{name}={value!r}: must be {allowed}. Correct it or unset it.")
        self.name, self.value, self.allowed = name, value, allowed

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.name, self.value, self.allowed)


class _BadValue(ValueError):
    """Raised by parsers; its text is the allowed forms."""


@dataclass(frozen=True)
class Variable:
    """One row of the table.

    Attributes:
        name: the variable.
        type: "bool", "int", "float" or "str".
        default: its value when unset; None means that nothing is in effect then.
        meaning: one line.
        parse: text without surrounding white space -> value.
        alias: another name of it, read only while `name` itself is unset.
    """

    name: str
    type: str
    default: Any
    meaning: str
    parse: Callable[[str], Any]
    alias: str | None = None


class Effective(NamedTuple):
    """A variable as it is in effect. `source` is "default" or the name of the variable that set it."""

    name: str
    value: Any
    default: Any
    source: str


def _bool(text: str) -> bool:
    match text.lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise _BadValue("1/0, true/false, yes/no or on/off")


def _positive_int(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise _BadValue("a whole number of at least 1")
    return value


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _fraction(text: str) -> float:
    value = _finite(text)
    if not 0 < value <= 1:
        raise _BadValue("a number above 0 and at most 1")
    return value


def _gib(text: str) -> float:
    value = _finite(text)
    if not value >= 0:
        raise _BadValue("a finite number of GiB, 0 or more")
    return value


def _log_level(text: str) -> str:
    if text.upper() not in LOG_LEVELS:
        raise _BadValue(f"one of {', '.join(LOG_LEVELS)}")
    return text.upper()


def _target(text: str) -> str:
    target = _TARGET_ALIASES.get(text.lower(), text.lower())
    if target not in TARGETS:
        raise _BadValue(f"one of {', '.join(TARGETS)} (or {', '.join(_TARGET_ALIASES)}, which mean the same)")
    return target


def _backend(text: str) -> str:
    # Never an error: an unknown value selects the native route, and warnings() says so.
    return text.lower() if text.lower() in BACKENDS else NATIVE


def _path(text: str) -> str:
    return os.path.expanduser(text)


_TABLE = (
    # Compilation and caching
    Variable("VLLM_NEURON_BACKEND", "str", NATIVE, "Compile route: neuron_native, or the deprecated vllm_neuron (XLA).",
             _backend),
    Variable("NEURON_COMPILED_ARTIFACTS", "str", None, "Folder of compiled models to load, or to fill.", _path),
    Variable("VLLM_NEURON_CPU_COMPILE", "bool", False, "Compile for Neuron on a machine without Neuron devices.",
             _bool),
    Variable("NEURON_PLATFORM_TARGET_OVERRIDE", "str", None,
             "Target of CPU compile mode and of the NKI simulator: trn2 or trn3.", _target),
    Variable("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "int", None, "Graphs compiled at the same time.",
             _positive_int),
    Variable("NEURON_LIBTORCH_REMOTE_CACHE", "str", None, "Shared folder of compiled graphs for all nodes.", _path),
    Variable("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "bool", False, "Compile every graph anew at every start.", _bool),
    Variable("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "int", None, "Seconds that one graph may take to compile.",
             _positive_int, alias="VLLM_NEURON_COMPILATION_TIMEOUT"),
    Variable("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "bool", False, "A graph that is not in the cache is a fatal error.",
             _bool),
    Variable("VLLM_CACHE_ROOT", "str", None, "Root folder of vLLM's caches; compiled graphs lie below it.", _path),
    # Runtime and execution
    Variable("VLLM_NEURON_CPU_MODE", "bool", False, "Run on the CPU, without Neuron devices, for development.", _bool),
    Variable("VLLM_NEURON_LOG_LEVEL", "str", "INFO", "Log level of this plugin.", _log_level),
    Variable("VLLM_NEURON_DISABLE_NKI_KERNELS", "bool", False, "Use the torch form of every operation, no kernels.",
             _bool),
    Variable("NKI_SIMULATOR", "bool", False, "Run NKI kernels on the CPU in the simulator.", _bool),
    Variable("NKI_PRECISE_FP", "bool", True, "Keep the precision of float types in the simulator; 0 uses float32.",
             _bool),
    Variable("VLLM_NEURON_ATTN_MASK_TORCH", "bool", False, "Build the decode attention mask in PyTorch, not in NKI.",
             _bool),
    Variable("VLLM_USE_V2_MODEL_RUNNER", "bool", None, "Model runner: 0 is V1, 1 is V2, unset chooses by model.",
             _bool),
    # Memory management
    Variable("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "float", 0.30, "Cap of the default KV cache budget, in (0, 1].",
             _fraction),
    Variable("VLLM_NEURON_RESERVED_HEADROOM_GIB", "float", None, "Memory kept free per worker; 0 counts as set.", _gib),
    Variable("VLLM_NEURON_MIN_KV_BUDGET_GIB", "float", 1.0, "The server does not start with a smaller KV cache budget.",
             _gib),
    # Metrics
    Variable("PROMETHEUS_MULTIPROC_DIR", "str", None, "Folder of prometheus_client's multiprocess files.", _path),
)  # fmt: skip

VARIABLES: Mapping[str, Variable] = {variable.name: variable for variable in _TABLE}
_BY_ANY_NAME = {**VARIABLES, **{v.alias: v for v in _TABLE if v.alias}}


def __getattr__(name: str) -> Any:
    if name in _BY_ANY_NAME:
        return read(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def read(name: str, env: Mapping[str, str] | None = None) -> Any:
    """The value of a variable of the table, or its default.

    Args:
        name: a name or alias of the table.
        env: where to read it; None is the process environment.

    Raises:
        EnvironmentVariableError: it holds something else than its allowed forms.
        KeyError: there is no such variable in the table.
    """
    variable = _BY_ANY_NAME[name]
    found, text = _lookup(variable, env)
    if text is None:
        return default(variable, env)
    try:
        return variable.parse(text)
    except _BadValue as bad:
        raise EnvironmentVariableError(found, text, str(bad)) from None


def is_known(name: str) -> bool:
    """Whether a name is in the table, as a variable or as an alias."""
    return name in _BY_ANY_NAME


def is_set(name: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether a variable of the table, or its alias, is set to something."""
    return _lookup(_BY_ANY_NAME[name], env)[1] is not None


def source(name: str, env: Mapping[str, str] | None = None) -> str:
    """The name, primary or alias, that a variable's value comes from; "default" when unset."""
    found, text = _lookup(_BY_ANY_NAME[name], env)
    return "default" if text is None else found


def default(variable: Variable, env: Mapping[str, str] | None = None) -> Any:
    """What is in effect while the variable is unset. VLLM_CACHE_ROOT's follows XDG_CACHE_HOME, as vLLM's does."""
    if variable.name != "VLLM_CACHE_ROOT":
        return variable.default
    base = (os.environ if env is None else env).get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(base) / "vllm")


def effective(env: Mapping[str, str] | None = None) -> list[Effective]:
    """Every variable as it is in effect, in the order of the table. A bad value is shown as such and raises nothing."""
    rows = []
    for variable in _TABLE:
        try:
            value = read(variable.name, env)
        except EnvironmentVariableError as error:
            value = f"invalid: {error.value!r}"
        rows.append(Effective(variable.name, value, default(variable, env), source(variable.name, env)))
    return rows


def warnings(env: Mapping[str, str] | None = None) -> list[str]:
    """What is suspicious but no error: an unknown backend, unknown names that look like ours, an alias not used."""
    return list(_warnings(os.environ if env is None else env))


def _warnings(env: Mapping[str, str]) -> Iterator[str]:
    backend = (env.get("VLLM_NEURON_BACKEND") or "").strip()
    if backend and backend.lower() not in BACKENDS:
        yield (
            f"VLLM_NEURON_BACKEND={backend!r} is not a compile route, so the native route is used. Set it to {NATIVE} "
            f"or {XLA}, or unset it."
        )
    for variable in _TABLE:
        if variable.alias and env.get(variable.name, "").strip() and env.get(variable.alias, "").strip():
            yield f"{variable.alias} is not used, because {variable.name} is set too and wins. Unset one of them."
    for name in sorted(env):
        if not name.startswith(_OURS) or name in _BY_ANY_NAME:
            continue
        if name in _RETIRED:
            yield f"Environment variable {name} has no effect. {_RETIRED[name]}. Unset it."
        else:
            yield f"Environment variable {name} is unknown and has no effect. Did you mean {closest(name)}?"


def closest(name: str) -> str:
    """The known variable whose name is most like `name`; the prefix counts less than the rest."""

    def likeness(known: str) -> float:
        whole = SequenceMatcher(None, name, known).ratio()
        return max(whole, SequenceMatcher(None, _without_prefix(name), _without_prefix(known)).ratio())

    return max(_BY_ANY_NAME, key=likeness)


def _without_prefix(name: str) -> str:
    for prefix in (*_OURS, "VLLM_", "NEURON_"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _lookup(variable: Variable, env: Mapping[str, str] | None) -> tuple[str, str | None]:
    """(name that is set, its text), or (primary name, None)."""
    env = os.environ if env is None else env
    for name in (variable.name, variable.alias):
        if name and (text := env.get(name, "").strip()):
            return name, text
    return variable.name, None
