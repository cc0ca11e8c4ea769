"""The table of environment variables."""

import pickle
import subprocess
import sys
from typing import Any

import pytest

from vllm_neuron import envs
from vllm_neuron.config import resolve
from vllm_neuron.kv_cache import budget

from .builders import settings

ROWS = [
    ("VLLM_NEURON_BACKEND", "str", "neuron_native"),
    ("NEURON_COMPILED_ARTIFACTS", "str", None),
    ("VLLM_NEURON_CPU_COMPILE", "bool", False),
    ("NEURON_PLATFORM_TARGET_OVERRIDE", "str", None),
    ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "int", None),
    ("NEURON_LIBTORCH_REMOTE_CACHE", "str", None),
    ("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "bool", False),
    ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "int", None),
    ("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "bool", False),
    ("VLLM_NEURON_CPU_MODE", "bool", False),
    ("VLLM_NEURON_LOG_LEVEL", "str", "INFO"),
    ("VLLM_NEURON_DISABLE_NKI_KERNELS", "bool", False),
    ("NKI_SIMULATOR", "bool", False),
    ("NKI_PRECISE_FP", "bool", True),
    ("VLLM_NEURON_ATTN_MASK_TORCH", "bool", False),
    ("VLLM_USE_V2_MODEL_RUNNER", "bool", None),
    ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "float", 0.30),
    ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "float", None),
    ("VLLM_NEURON_MIN_KV_BUDGET_GIB", "float", 1.0),
    ("PROMETHEUS_MULTIPROC_DIR", "str", None),
]
BOOLEANS = [name for name, kind, _ in ROWS if kind == "bool"]


def test_the_table_is_complete() -> None:
    assert set(envs.VARIABLES) == {name for name, _, _ in ROWS} | {"VLLM_CACHE_ROOT"}


@pytest.mark.parametrize(("name", "kind", "default"), ROWS)
def test_type_and_default_of_every_variable(name: str, kind: str, default: Any) -> None:
    assert envs.VARIABLES[name].type == kind
    assert envs.VARIABLES[name].meaning.endswith(".")
    assert envs.read(name, {}) == default
    assert envs.read(name, {name: "  "}) == default, "white space only is unset"
    assert not envs.is_set(name, {name: ""})


def test_cache_root_follows_home_and_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert envs.read("VLLM_CACHE_ROOT", {}) == "/home/somebody/.cache/vllm"
    assert envs.read("VLLM_CACHE_ROOT", {"XDG_CACHE_HOME": "/cache"}) == "/cache/vllm"
    assert envs.read("VLLM_CACHE_ROOT", {"XDG_CACHE_HOME": "/cache", "VLLM_CACHE_ROOT": "~/c"}) == "/home/somebody/c"


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("text", ["1", "true", "True", "YES", "on", " on "])
def test_true_forms(name: str, text: str) -> None:
    assert envs.read(name, {name: text}) is True


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("text", ["0", "false", "FALSE", "no", "Off"])
def test_false_forms(name: str, text: str) -> None:
    assert envs.read(name, {name: text}) is False


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VLLM_NEURON_BACKEND", "neuron_native", "neuron_native"),
        ("VLLM_NEURON_BACKEND", " NEURON_NATIVE ", "neuron_native"),
        ("VLLM_NEURON_BACKEND", "vllm_neuron", "vllm_neuron"),
        ("VLLM_NEURON_BACKEND", "", "neuron_native"),
        ("VLLM_NEURON_BACKEND", "xla", "neuron_native"),
        ("VLLM_NEURON_BACKEND", "neuron", "neuron_native"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "TRN2", "trn2"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "gen3", "trn2"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "Gen4", "trn3"),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "4", 4),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "1200", 1200),
        ("VLLM_NEURON_LOG_LEVEL", "debug", "DEBUG"),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "1", 1.0),
        ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "0", 0.0),
        ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "4.5", 4.5),
        ("VLLM_NEURON_MIN_KV_BUDGET_GIB", "0", 0.0),
    ],
)
def test_good_values(name: str, text: str, value: Any) -> None:
    assert envs.read(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        *((name, "maybe", "1/0, true/false, yes/no or on/off") for name in BOOLEANS),
        ("VLLM_NEURON_CPU_MODE", "2", "1/0"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9", "trn2, trn3"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "inf2", "trn2, trn3 (or gen3, gen4"),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "0", "at least 1"),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "four", "at least 1"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "-5", "at least 1"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "1.5", "at least 1"),
        ("VLLM_NEURON_LOG_LEVEL", "LOUD", "DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "0", "above 0"),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "1.01", "at most 1"),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "nan", "above 0"),
        ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "-1", "0 or more"),
        ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "abc", "0 or more"),
        ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "inf", "finite"),
        ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "nan", "finite"),
        ("VLLM_NEURON_MIN_KV_BUDGET_GIB", "-0.1", "0 or more"),
    ],
)
def test_bad_values_name_variable_value_and_forms(name: str, text: str, allowed: str) -> None:
    with pytest.raises(envs.EnvironmentVariableError) as raised:
        envs.read(name, {name: text})
    message = str(raised.value)
    assert name in message and repr(text) in message and allowed in message
    assert str(pickle.loads(pickle.dumps(raised.value))) == message


def test_reads_are_never_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE", raising=False)
    assert envs.VLLM_NEURON_CPU_MODE is False
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "on")
    assert envs.VLLM_NEURON_CPU_MODE is True
    with pytest.raises(AttributeError, match="VLLM_NEURON_CPU_MOD"):
        _ = envs.VLLM_NEURON_CPU_MOD


def test_the_alias_of_the_timeout() -> None:
    name, alias = "NEURON_LIBTORCH_COMPILATION_TIMEOUT", "VLLM_NEURON_COMPILATION_TIMEOUT"
    assert envs.read(name, {alias: "7"}) == envs.read(alias, {alias: "7"}) == 7
    assert envs.source(name, {alias: "7"}) == alias
    assert envs.read(name, {alias: "7", name: "9"}) == envs.read(alias, {alias: "7", name: "9"}) == 9
    assert envs.warnings({alias: "7"}) == []
    (warning,) = envs.warnings({alias: "7", name: "9"})
    assert name in warning and alias in warning
    with pytest.raises(envs.EnvironmentVariableError, match=alias):
        envs.read(name, {alias: "soon"})


@pytest.mark.parametrize(
    ("unknown", "suggestion"),
    [
        ("VLLM_NEURON_REMOTE_CACHE", "NEURON_LIBTORCH_REMOTE_CACHE"),
        ("VLLM_NEURON_CPU_MOD", "VLLM_NEURON_CPU_MODE"),
        ("NEURON_LIBTORCH_CPU_MODE", "VLLM_NEURON_CPU_MODE"),
        ("VLLM_NEURON_DISABLE_COMPILE_CACHE", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"),
        ("VLLM_NEURON_PARALLEL_COMPILE_WORKERS", "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS"),
        ("NEURON_LIBTORCH_COMPILE_TIMEOUT", "NEURON_LIBTORCH_COMPILATION_TIMEOUT"),
        ("VLLM_NEURON_HEADROOM_GIB", "VLLM_NEURON_RESERVED_HEADROOM_GIB"),
        ("VLLM_NEURON_FRAMEWORK", "Unset it"),
    ],
)
def test_unknown_names_get_one_warning_with_the_closest_name(unknown: str, suggestion: str) -> None:
    (warning,) = envs.warnings({unknown: "x", "NEURON_RT_LOG_LEVEL": "x", "VLLM_LOGGING_LEVEL": "x"})
    assert unknown in warning and suggestion in warning


@pytest.mark.parametrize("value", ["neuron", "xla", "torch_neuronx"])
def test_an_unknown_backend_warns(value: Any) -> None:
    (warning,) = envs.warnings({"VLLM_NEURON_BACKEND": value})
    assert repr(value) in warning and "native" in warning


@pytest.mark.parametrize("value", ["", " ", "neuron_native", " NEURON_NATIVE ", "vllm_neuron"])
def test_a_known_backend_does_not_warn_here(value: Any) -> None:
    assert envs.warnings({"VLLM_NEURON_BACKEND": value}) == []


def test_effective_lists_everything_and_raises_nothing() -> None:
    rows = {
        row.name: row for row in envs.effective({"VLLM_NEURON_CPU_MODE": "maybe", "VLLM_NEURON_LOG_LEVEL": "debug"})
    }
    assert list(rows) == list(envs.VARIABLES)
    assert rows["VLLM_NEURON_CPU_MODE"].value == "invalid: 'maybe'"
    assert rows["VLLM_NEURON_LOG_LEVEL"] == ("VLLM_NEURON_LOG_LEVEL", "DEBUG", "INFO", "VLLM_NEURON_LOG_LEVEL")
    assert rows["VLLM_NEURON_BACKEND"].source == "default"


def test_every_variable_is_accepted() -> None:
    """Set to a harmless good value, beside what it needs."""
    for variable in envs.VARIABLES.values():
        value = {"bool": "1", "int": "2", "float": "0.5", "str": "trn2"}[variable.type]
        value = {"VLLM_NEURON_LOG_LEVEL": "ERROR", "VLLM_NEURON_BACKEND": "vllm_neuron"}.get(variable.name, value)
        needed = {
            "VLLM_NEURON_CPU_COMPILE": {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"},
            "NKI_SIMULATOR": {"VLLM_NEURON_CPU_MODE": "1"},
        }
        resolve(settings(), {}, {variable.name: value, **needed.get(variable.name, {})})


def test_the_kv_budget_names_the_same_variables() -> None:
    assert {budget.HEADROOM_VARIABLE, budget.CAP_VARIABLE, budget.MINIMUM_VARIABLE} <= set(envs.VARIABLES)


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, vllm_neuron.envs, vllm_neuron.config; print({'vllm', 'torch', 'torch_xla'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
