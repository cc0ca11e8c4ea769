"""HBM allocation failures: recognised by their four signatures, answered with the advice for the policy in force."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fixtures import config
from vllm_neuron.compilation.hbm_signatures import hbm_signature
from vllm_neuron.compilation.pool import JobFailedError
from vllm_neuron.engine.hbm import HBMAllocationError, hbm_failures_explained
from vllm_neuron.routes import neuronx_cc

TEXTS = {
    "NCC_EOOM002": "[ERROR] [NCC_EOOM002] Estimated peak HBM usage exceeds the device",
    "Maximum peak HBM usage": "Maximum peak HBM usage is 25.1 GB, and 24 GB are there",
    "NRT_RESOURCE": "load failed with NRT_RESOURCE (4)",
    "nrt_load_util NRT_RESOURCE": "TDRV:nrt_load_util  failed to load the model: NRT_RESOURCE",
    "nrt_tensor_allocate status=4": 'nrt_tensor_allocate status=4 message="Allocation Failure"',
    "Allocation Failure": "Failed to load model: Allocation Failure",
}
DEFAULT: dict[str, Any] = {"kv_cap_fraction": 0.30, "gpu_memory_utilization": 0.9}
HEADROOM: dict[str, Any] = {"kv_headroom_gib": 4.0, "gpu_memory_utilization": 1.0}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_default_policy_is_told_to_lower_the_cap(text: str) -> None:
    with pytest.raises(HBMAllocationError) as caught, hbm_failures_explained(config(**DEFAULT)):
        raise RuntimeError(text)
    told = str(caught.value)
    assert told.startswith(f"{text}\nHBM allocation failure ({hbm_signature(text)})")
    assert "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION=0.3 and gpu_memory_utilization=0.9" in told
    assert "export VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION=0.25" in told
    assert "HEADROOM" not in told and "ncrease" not in told
    assert str(caught.value.__cause__) == text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_headroom_policy_is_told_to_raise_the_reserve(text: str) -> None:
    with pytest.raises(HBMAllocationError) as caught, hbm_failures_explained(config(**HEADROOM)):
        raise RuntimeError(text)
    told = str(caught.value)
    assert told.startswith(text)
    assert "VLLM_NEURON_RESERVED_HEADROOM_GIB=4 is the reserve in force. Increase it" in told
    assert "export VLLM_NEURON_RESERVED_HEADROOM_GIB=5." in told
    assert "CAP_FRACTION" not in told and "ecrease" not in told


def test_no_reserve_at_all_is_a_reserve_too() -> None:
    with pytest.raises(HBMAllocationError) as caught, hbm_failures_explained(config(kv_headroom_gib=0.0)):
        raise RuntimeError("NCC_EOOM002")
    assert "export VLLM_NEURON_RESERVED_HEADROOM_GIB=1." in str(caught.value)


def test_a_size_set_by_hand_is_named() -> None:
    settings = config(num_gpu_blocks_override=64, **HEADROOM)
    with pytest.raises(HBMAllocationError, match="lower num_gpu_blocks_override=64"), hbm_failures_explained(settings):
        raise RuntimeError("NCC_EOOM002")


def test_the_cause_of_an_exception_and_the_compiler_log_are_read(tmp_path: Path) -> None:
    with pytest.raises(HBMAllocationError, match="weights are not placed"), hbm_failures_explained(config()):
        try:
            raise OSError("nrt_tensor_allocate failed, status = 4")
        except OSError as error:
            raise RuntimeError("weights are not placed") from error
    log = tmp_path / "decode.log"
    log.write_text("compiling\nMaximum peak HBM usage: 30 GB\n" + "more\n" * 100)
    with pytest.raises(HBMAllocationError) as caught, hbm_failures_explained(config()):
        raise JobFailedError("decode_b1", "exit code 70", log, ["more"])
    assert str(caught.value).startswith(f"Compiling decode_b1 failed: exit code 70. Log: {log}\n  more\nHBM allocation")


def test_other_failures_are_left_alone(tmp_path: Path) -> None:
    others = (
        RuntimeError("nrt_tensor_allocate status=2"),
        RuntimeError("RESOURCE_EXHAUSTED"),
        JobFailedError("g", "exit code 1", tmp_path / "gone.log"),
    )
    for error in others:
        with pytest.raises(type(error)) as caught, hbm_failures_explained(config()):
            raise error
        assert caught.value is error


def test_neuronx_cc_shows_the_line_however_early_it_was_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "neuronx-cc"
    compiler.write_text(
        f"#!{sys.executable} -IS\nprint('[NCC_EOOM002] too large')\n"
        "for number in range(100): print('line', number)\nraise SystemExit(70)\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(neuronx_cc, "find", lambda: compiler)
    with pytest.raises(HBMAllocationError) as caught, hbm_failures_explained(config(**HEADROOM)):
        neuronx_cc.compile_hlo("decode_b1", b"module", "trn2")
    told = str(caught.value)
    assert "failed with exit code 70 on graph decode_b1" in told and "[NCC_EOOM002] too large" in told
    assert "line 99" in told and "export VLLM_NEURON_RESERVED_HEADROOM_GIB=5" in told
