"""From vLLM's configuration and a machine's memory to KV blocks, with faked machines; and who agrees on them."""

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

from tests.checkpoints import write_checkpoint
from tests.models.fp8 import LLM_COMPRESSOR, MODELOPT, write_checkpoint_with_kv_scales
from tests.plugin.test_platform import make_config
from vllm_neuron.kv_cache.budget import GIB, KVBudgetError
from vllm_neuron.kv_cache.layout import block_bytes, pool_indexes
from vllm_neuron.models.registry import build_model
from vllm_neuron.plugin import memory
from vllm_neuron.plugin.kv_specs import kv_cache_specs, require_groups
from vllm_neuron.plugin.models import served_model
from vllm_neuron.plugin.settings import model_dtype, resolved_config
from vllm_neuron.plugin.weights import load_model_weights

BLOCK = 2 * 2 * 2 * 16 * 4 * 32
"""Bytes: 2 layers, keys and values, 2 heads of 16 float32, 32 tokens."""
FULL, SLIDING = "full_attention", "sliding_attention"


def blocks(vllm_config: VllmConfig) -> int:
    return memory.expected_blocks(vllm_config, served_model(vllm_config)).num_blocks


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 20 GiB available."""
    monkeypatch.setattr(memory, "host_memory_available", lambda: 20 * GIB)
    monkeypatch.setattr(memory, "weight_bytes", lambda model, dtype: 0)


@pytest.fixture
def trn2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainium 2, to compile for: 24 GiB a logical core, weights of 2 GiB."""
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", "1")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setattr("vllm_neuron.engine.memory.weight_bytes", lambda model, dtype: 2 * GIB)


@pytest.mark.parametrize(
    ("variables", "expected_gib"),
    [
        # 24 * 0.9 * 0.3 < 24 * 0.9 - 2
        ({}, 6.48),
        # 24 * 0.9 - 2 < 24 * 0.9 * 1
        ({"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "1"}, 19.6),
        ({"VLLM_NEURON_RESERVED_HEADROOM_GIB": "0"}, 22),
        ({"VLLM_NEURON_RESERVED_HEADROOM_GIB": "4"}, 18),
        ({"VLLM_NEURON_RESERVED_HEADROOM_GIB": "5"}, 17),
    ],
)
def test_blocks_on_trainium_2(
    variables: dict[str, str], expected_gib: float, trn2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert blocks(make_config(gpu_memory_utilization=0.9)) == int(expected_gib * GIB) // BLOCK


def test_kvm_1_a_long_context_starts_without_any_setting(
    host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "model", max_position_embeddings=40960)

    def found(**variables: str) -> int:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            config = make_config(path, max_model_len=40960, max_num_seqs=256, gpu_memory_utilization=0.9)
            if "VLLM_NEURON_RESERVED_HEADROOM_GIB" in variables:
                assert config.cache_config.gpu_memory_utilization == 1.0
            return blocks(config)

    # 20 * 0.9 * 0.3 = 5.4, rounded down.
    assert found() == 5 * GIB // BLOCK
    assert found(VLLM_NEURON_RESERVED_HEADROOM_GIB="0") == 20 * GIB // BLOCK
    with pytest.raises(KVBudgetError, match=r"RESERVED_HEADROOM_GIB=100000: the largest headroom that fits is 19\."):
        found(VLLM_NEURON_RESERVED_HEADROOM_GIB="100000")
    with pytest.raises(KVBudgetError, match=r"One request of max_model_len=40960 tokens needs .* longest context"):
        found(VLLM_NEURON_RESERVED_HEADROOM_GIB="19.99", VLLM_NEURON_MIN_KV_BUDGET_GIB="0.01")


def test_fp8_gives_the_same_memory_four_times_the_blocks_of_float32(trn2: None) -> None:
    wide, narrow = make_config(), make_config(kv_cache_dtype="fp8")
    assert blocks(narrow) // 4 == blocks(wide)
    assert resolved_config(narrow).fp8_kv_cache


def test_workers_that_measure_differently_get_the_same_blocks() -> None:
    config = make_config()
    specs = kv_cache_specs(served_model(config), 32, model_dtype(config))
    found = get_kv_cache_configs(config, [specs, specs], [5 * GIB, 4 * GIB])
    assert [one.num_blocks for one in found] == [4 * GIB // BLOCK] * 2


def test_vllm_groups_layers_as_the_model_does() -> None:
    """Where it does not, `require_groups` raises."""
    config = make_config()
    for kinds in (kinds for layers in range(1, 8) for kinds in itertools.product((FULL, SLIDING), repeat=layers)):
        hf_config = Qwen2Config(num_hidden_layers=len(kinds), architectures=["Qwen2ForCausalLM"])
        hf_config.layer_types, hf_config.sliding_window = list(kinds), 40
        model = build_model(hf_config)
        specs = kv_cache_specs(model, 32, model_dtype(config))
        (found,) = get_kv_cache_configs(config, [specs], [8 * GIB])
        require_groups(found, model)
        pools = [[int(name.split(".")[1]) for name in tensor.shared_by] for tensor in found.kv_cache_tensors]
        assert [pool_indexes(model.kv_layers)[layer] for pool in pools for layer in pool] == [
            index for index, pool in enumerate(pools) for _ in pool
        ]
        assert found.num_blocks == 8 * GIB // block_bytes(model.kv_layers, 32, model_dtype(config))


@pytest.mark.parametrize("layout", [LLM_COMPRESSOR, MODELOPT], ids=["llm-compressor", "ModelOpt"])
def test_a_calibrated_checkpoint_is_served(layout: tuple[str, str], tmp_path: Path) -> None:
    path = write_checkpoint_with_kv_scales(tmp_path / "model", layout)
    config = make_config(path, kv_cache_dtype="fp8")
    weights = load_model_weights(config, served_model(config))
    assert weights["layers.1.kv_dequantize"].tolist() == pytest.approx([0.025, 0.015])
    assert weights["layers.1.kv_quantize"].tolist() == pytest.approx([40, 1 / 0.015])


def test_missing_scales_are_one_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(kv_cache_dtype="fp8_e4m3")
    with caplog.at_level(logging.WARNING):
        logging.getLogger("vllm_neuron").addHandler(caplog.handler)
        weights = load_model_weights(config, served_model(config))
        logging.getLogger("vllm_neuron").removeHandler(caplog.handler)
    assert weights["layers.0.kv_quantize"].tolist() == [1.0, 1.0]
    # The handler may also get it by propagation.
    (told,) = {message for message in caplog.messages if "no scales" in message}
    assert "calibrate-kv" in told


def test_on_trainium_2_the_limit_is_240_and_scales_are_stretched(trn2: None, tmp_path: Path) -> None:
    config = make_config(write_checkpoint_with_kv_scales(tmp_path / "model"), kv_cache_dtype="fp8")
    model: Any = served_model(config)
    assert model.constants["kv_limit"].tolist() == [240.0]
    assert load_model_weights(config, model)["layers.0.kv_dequantize"].tolist() == pytest.approx([0.04, 0.06])
