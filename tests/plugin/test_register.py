"""Which platform vLLM ends up with, in a process of its own each time: it is chosen once per process."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm import platforms
from vllm.plugins import PLATFORM_PLUGINS_GROUP, load_plugins_by_group

import vllm_neuron
from vllm_neuron.plugin.activation import PLATFORM, ActivationError, activate, require_vllm_version

CHOSEN = "from vllm.platforms import current_platform as p; print('chosen', type(p).__module__, type(p).__name__)"
OUR_PREFIXES = ("VLLM_", "NEURON_")


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code without any variable of ours or vLLM's but these."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OUR_PREFIXES)}
    return subprocess.run([sys.executable, "-c", code], env={**env, **variables}, capture_output=True, text=True)


def error_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR")]


def test_cpu_mode_selects_the_platform() -> None:
    done = run(CHOSEN, VLLM_NEURON_CPU_MODE="1")
    assert "chosen vllm_neuron.plugin.platform NeuronPlatform" in done.stdout, done.stderr


def test_cpu_mode_comes_before_vllms_own_cpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(platforms.builtin_platform_plugins, "cpu", lambda: "vllm.platforms.cpu.CpuPlatform")
    assert platforms.resolve_current_platform_cls_qualname() == PLATFORM


@pytest.mark.parametrize("allowed", ["", "other"])
def test_vllm_asks_nobody_that_its_own_variable_leaves_out(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM does not call the plugin then, so that nothing of ours can log it: `vllm-neuron doctor` says so."""
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert "neuron" not in load_plugins_by_group(PLATFORM_PLUGINS_GROUP)
    monkeypatch.setenv("VLLM_PLUGINS", "other,neuron")
    assert "neuron" in load_plugins_by_group(PLATFORM_PLUGINS_GROUP)


def test_stays_out_and_says_why() -> None:
    done = run(CHOSEN)
    assert done.returncode == 0 and "NeuronPlatform" not in done.stdout
    reasons = [line for line in done.stderr.splitlines() if "stays out" in line]
    assert len(reasons) == 1 and "VLLM_NEURON_CPU_MODE=1" in reasons[0] and "/dev/neuron*" in reasons[0]


def test_a_device_selects_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    assert activate(tmp_path) is None
    (tmp_path / "neuron0").touch()
    assert activate(tmp_path) == PLATFORM


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"VLLM_NEURON_CPU_MODE": "maybe"}, ["VLLM_NEURON_CPU_MODE", "'maybe'", "true/false"]),
        ({"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_CPU_COMPILE": "1"}, ["VLLM_NEURON_CPU_COMPILE=1", "unset one"]),
        ({"VLLM_NEURON_CPU_COMPILE": "1"}, ["NEURON_PLATFORM_TARGET_OVERRIDE", "trn2"]),
        ({"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_LOG_LEVEL": "loud"}, ["VLLM_NEURON_LOG_LEVEL", "'loud'"]),
    ],
)
def test_a_wrong_environment_is_told_in_one_line_and_ends_the_process(
    variables: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By SystemExit, which vLLM does not swallow: the tests below see processes end of it."""
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    logger = logging.getLogger("vllm_neuron")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    with pytest.raises(SystemExit) as exit_:
        vllm_neuron.register()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert exit_.value.code == 1 and all(word in line for word in words), line


def test_a_platform_that_cannot_be_imported_ends_the_process() -> None:
    broken = f"import sys; sys.modules['vllm_neuron.plugin.settings'] = None; {CHOSEN}"
    done = run(broken, VLLM_NEURON_CPU_MODE="1")
    assert done.returncode != 0 and "chosen" not in done.stdout
    (line,) = error_lines(done)
    assert "vllm_neuron.plugin.settings" in line and "Reinstall" in line


def test_another_vllm_ends_the_process() -> None:
    other = (
        "from importlib import metadata as m; known = m.version; "
        f"m.version = lambda name: '0.17.1' if name == 'vllm' else known(name); {CHOSEN}"
    )
    done = run(other, VLLM_NEURON_CPU_MODE="1")
    assert done.returncode != 0 and "chosen" not in done.stdout
    (line,) = error_lines(done)
    assert "vLLM 0.17.1" in line and ">=0.16.0,<0.17" in line


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.16.0+cpu"])
def test_supported_versions(version: str) -> None:
    require_vllm_version(version)


@pytest.mark.parametrize("version", ["0.15.9", "0.17.0", "1.16.0", "0.160.0"])
def test_unsupported_versions(version: str) -> None:
    with pytest.raises(ActivationError, match="Install vllm=="):
        require_vllm_version(version)
