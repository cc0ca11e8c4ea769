"""What is known of Neuron devices, and that a worker refuses to serve where there are none."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.fixtures import config
from vllm_neuron.kv_cache.budget import GIB
from vllm_neuron.plugin import hardware
from vllm_neuron.plugin.hardware import compile_target, device_target, documented_memory_per_core, memory_per_core
from vllm_neuron.plugin.worker import NeuronWorker
from vllm_neuron.routes.neuronx_cc import CompilerError
from vllm_neuron.routes.route import CPU, Target


@pytest.mark.parametrize(
    ("instance_type", "target"),
    [
        ("trn2.48xlarge\n", "trn2"),
        ("trn2u.48xlarge", "trn2"),
        ("trn2n.48xlarge", "trn2"),
        ("trn2.3xlarge", "trn2"),
        ("trn3.48xlarge", "trn3"),
    ],
)
def test_devices_are_told_by_the_instance_type(instance_type: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "product_name").write_text(instance_type)
    assert device_target(tmp_path / "product_name") == target


@pytest.mark.parametrize("name", ["trn1.32xlarge", "inf2.xlarge", "m5.large", "Standard PC (i440FX + PIIX, 1996)", ""])
def test_another_machine_is_named_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "product_name").write_text(name)
    with pytest.raises(RuntimeError) as raised:
        device_target(tmp_path / "product_name")
    for part in (repr(name), "trn2 and trn3", "VLLM_NEURON_CPU_MODE=1", "NEURON_PLATFORM_TARGET_OVERRIDE"):
        assert part in str(raised.value)
    with pytest.raises(RuntimeError, match=r"cannot be read \(No such file .*Set VLLM_NEURON_CPU_MODE=1"):
        device_target(tmp_path / "absent")


def test_the_target_of_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "device_target", lambda: "trn3")
    assert compile_target(config()) == CPU
    assert compile_target(config(cpu_mode=False)) == Target("trn3")
    only = config(cpu_mode=False, cpu_compile=True, platform_target="trn2")
    assert compile_target(only) == Target("trn2", compile_only=True)


def test_documented_memory_of_a_logical_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    assert documented_memory_per_core("trn2") == 24 * GIB
    assert documented_memory_per_core("trn3") == 36 * GIB
    only = config(cpu_mode=False, cpu_compile=True, platform_target="trn3")
    assert memory_per_core(only) == 36 * GIB
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert documented_memory_per_core("trn2") == 12 * GIB
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "two")
    with pytest.raises(CompilerError, match="NEURON_LOGICAL_NC_CONFIG='two'"):
        documented_memory_per_core("trn2")


def test_a_worker_refuses_to_serve_where_it_can_only_compile() -> None:
    worker = NeuronWorker.__new__(NeuronWorker)
    worker.config = config(cpu_mode=False, cpu_compile=True, platform_target="trn2")
    worker.model_config = SimpleNamespace(model="/models/llama")  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as raised:
        worker.init_device()
    for part in ("VLLM_NEURON_CPU_COMPILE=1", "trn2", "vllm-neuron compile /models/llama", "same flags"):
        assert part in str(raised.value)
