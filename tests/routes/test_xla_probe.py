"""What the XLA route says about the packages it needs."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from vllm_neuron.routes import xla_lower
from vllm_neuron.routes.route import CPU, Target
from vllm_neuron.routes.xla import XlaRoute


def test_the_route_works_here_in_cpu_mode() -> None:
    probe = XlaRoute(CPU).probe()
    assert probe.works, probe.reason
    assert probe.versions["torch-xla"].startswith("2.9.")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch_xla" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    probe = XlaRoute(CPU).probe()
    assert not probe.works
    assert "pip install torch-xla==2.9.0" in probe.reason and "unset VLLM_NEURON_BACKEND" in probe.reason


def test_lowering_without_torch_xla_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch_xla", None)
    with pytest.raises(ImportError, match=r"pip install torch-xla==2\.9\.0, or unset VLLM_NEURON_BACKEND"):
        xla_lower.import_torch_xla()


def test_on_neuron_devices_the_packages_of_the_compiler_are_named() -> None:
    probe = XlaRoute(Target("trn2")).probe()
    assert not probe.works
    assert "libneuronxla, neuronx-cc" in probe.reason
    assert "VLLM_NEURON_CPU_MODE=1" in probe.reason
    assert probe.versions["neuronx-cc"] == "absent"
