"""Where weights come from."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import checkpoint
from tests.plugin.simulation import make_config
from vllm_neuron.models.registry import build_model
from vllm_neuron.plugin.kv_specs import kv_cache_specs, require_groups
from vllm_neuron.plugin.settings import model_dtype
from vllm_neuron.plugin.weights import checkpoint_folder, load_model_weights


def test_weights_are_read_from_the_models_folder() -> None:
    config = make_config()
    model = build_model(config.model_config.hf_text_config)
    assert checkpoint_folder(config) == Path(checkpoint("llama"))
    weights = load_model_weights(config, model)
    assert set(weights) == set(model.weight_table)
    assert {weight.dtype for weight in weights.values()} == {model_dtype(config)} == {torch.float32}


def test_dummy_weights_need_no_files_and_follow_the_seed() -> None:
    one, same, other = (
        load_model_weights(config, build_model(config.model_config.hf_text_config))["embed"]
        for config in (make_config(load_format="dummy", seed=seed) for seed in (1, 1, 2))
    )
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_the_block_manager_learns_of_every_layer() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    config = make_config()
    model = build_model(config.model_config.hf_text_config)
    specs = kv_cache_specs(model, 32, torch.bfloat16)
    assert [spec.page_size_bytes for spec in specs.values()] == [32 * 2 * 2 * 16 * 2] * 2
    spec = next(iter(specs.values()))
    require_groups(KVCacheConfig(4, [], [KVCacheGroupSpec(list(specs), spec)]), model)
    apart = [KVCacheGroupSpec([name], spec) for name in specs]
    with pytest.raises(RuntimeError, match="block tables are made"):
        require_groups(KVCacheConfig(4, [], apart), model)
