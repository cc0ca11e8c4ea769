"""The KV cache's size for a configuration and a model."""

import logging

import pytest
import torch

from tests.engine.fixtures import config, tiny_model
from vllm_neuron.compilation.cache import local_cache_root
from vllm_neuron.engine.memory import kv_budget_on_cpu, kv_budget_on_neuron, kv_cache_bytes
from vllm_neuron.kv_cache.budget import GIB, KVBudgetError
from vllm_neuron.kv_cache.layout import block_bytes

# Two layers, keys and values, 2 heads of 8 float32, 16 tokens.
BLOCK = 2 * 2 * 2 * 8 * 4 * 16


def test_bytes_of_a_block() -> None:
    assert block_bytes(tiny_model().kv_layers, 16, torch.float32) == BLOCK
    assert block_bytes(tiny_model().kv_layers, 16, torch.bfloat16) == BLOCK // 2


def test_default_start_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    # Long and many enough to use any budget.
    resolved = config(max_model_len=65536, max_num_seqs=256)
    budget = kv_budget_on_cpu(resolved, 20 * GIB, 1)
    assert budget.num_bytes == int(20 * GIB * 0.9 * 0.3)
    with caplog.at_level(logging.INFO):
        assert kv_cache_bytes(resolved, tiny_model(), torch.float32, budget) == 5 * GIB
    # 5 GiB are 1310720 blocks of 4096 bytes, of which one holds nothing.
    assert caplog.messages[0].splitlines() == [
        "KV cache: 5.000 GiB per worker",
        "  policy   default policy: gpu_memory_utilization=0.9, VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION=0.3",
        "  budget   5.400 GiB = 20.000 GiB of host memory available / 1 local workers * 0.9 gpu_memory_utilization * "
        "0.3 cap",
        "  minimum  1 GiB (VLLM_NEURON_MIN_KV_BUDGET_GIB)",
        "  taken    5.000 GiB: the budget rounded down, so that the next start finds the same graphs",
        "  blocks   1310720 of 16 tokens and 4096 bytes (2 layers in float32), one of them for padding",
        "  tokens   20971504, or 320.00 requests of max_model_len=65536",
    ]
    slightly_less = kv_budget_on_cpu(resolved, int(19.5 * GIB), 1)
    assert kv_cache_bytes(resolved, tiny_model(), torch.float32, slightly_less) == 5 * GIB


def test_a_tiny_model_on_the_cpu_takes_no_gigabytes(caplog: pytest.LogCaptureFixture) -> None:
    budget = kv_budget_on_cpu(config(), 20 * GIB, 1)
    with caplog.at_level(logging.INFO):
        # 4 times 4 requests of 256 tokens in blocks of 16, each with a block to spare.
        assert kv_cache_bytes(config(), tiny_model(), torch.float32, budget) == 4 * 4 * 17 * BLOCK
    assert "limited to 4 times what max_num_seqs=4 requests can use" in caplog.text
    explicit = config(kv_headroom_gib=10.0)
    budget = kv_budget_on_cpu(explicit, 20 * GIB, 1)
    assert kv_cache_bytes(explicit, tiny_model(), torch.float32, budget) == 10 * GIB


def test_settings_reach_the_budget() -> None:
    resolved = config(gpu_memory_utilization=1.0, kv_headroom_gib=0.0, kv_minimum_gib=10.5)
    budget = kv_budget_on_cpu(resolved, 23 * GIB, 2)
    assert budget.num_bytes == 11.5 * GIB
    # Rounded down it would be 10 GiB, but rounding never goes below the minimum that the budget has met.
    assert kv_cache_bytes(resolved, tiny_model(), torch.float32, budget) == 10.5 * GIB
    demanding = config(kv_minimum_gib=5.41)
    with pytest.raises(KVBudgetError, match="below minimum threshold"):
        kv_cache_bytes(demanding, tiny_model(), torch.float32, kv_budget_on_cpu(demanding, 20 * GIB, 1))


def test_neuron_counts_the_weight_table_and_rounds_nothing() -> None:
    model, resolved = tiny_model(), config(cpu_mode=False, kv_headroom_gib=4.0)
    # embed and lm_head, per layer qkv, out, gate_up, down and two norms, final norm.
    weights = 2 * 96 * 32 + 2 * (64 * 32 + 32 * 32 + 96 * 32 + 32 * 48 + 2 * 32) + 32
    budget = kv_budget_on_neuron(resolved, model, torch.bfloat16, 24 * GIB)
    assert budget.num_bytes == 20 * GIB - 2 * weights
    assert kv_cache_bytes(resolved, model, torch.bfloat16, budget) == budget.num_bytes


def test_blocks_set_by_hand() -> None:
    budget = kv_budget_on_cpu(config(), 20 * GIB, 1)
    for blocks in (17, 40):
        resolved = config(num_gpu_blocks_override=blocks)
        assert kv_cache_bytes(resolved, tiny_model(), torch.float32, budget) == blocks * BLOCK
    with pytest.raises(KVBudgetError, match="num_gpu_blocks_override=16 is too small"):
        kv_cache_bytes(config(num_gpu_blocks_override=16), tiny_model(), torch.float32, budget)
    most = 20 * GIB // BLOCK
    with pytest.raises(KVBudgetError, match=rf"num_gpu_blocks_override={most + 1} takes .* Set it to {most} or less"):
        kv_cache_bytes(config(num_gpu_blocks_override=most + 1), tiny_model(), torch.float32, budget)


def test_one_request_must_fit() -> None:
    resolved = config(max_model_len=1 << 30, kv_minimum_gib=0.0)
    with pytest.raises(KVBudgetError, match="One request of max_model_len=1073741824 tokens needs"):
        kv_cache_bytes(resolved, tiny_model(), torch.float32, kv_budget_on_cpu(resolved, 20 * GIB, 1))


def test_cache_folder_follows_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    assert str(local_cache_root()) == "/elsewhere/neuron/compile_cache"
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(local_cache_root()) == "/xdg/vllm/neuron/compile_cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    assert str(local_cache_root()) == "/somebody/.cache/vllm/neuron/compile_cache"
