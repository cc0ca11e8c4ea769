"""The KV cache in 8-bit floats: scales from a checkpoint, their direction, and what the model makes of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import checkpoint, logits_oracle, prompt
from tests.models.fp8 import (
    LLM_COMPRESSOR,
    MODELOPT,
    SCALES,
    load_with_fp8_cache,
    new_fp8_cache,
    write_checkpoint_with_kv_scales,
)
from tests.models.paging import load, prefill, shuffled_table
from vllm_neuron.kernels.kv_fp8_torch import FP8
from vllm_neuron.kv_cache.fp8 import limit_of, stretch_of
from vllm_neuron.kv_cache.layout import block_bytes, cache_dtype
from vllm_neuron.models.fp8_cache import with_fp8_cache
from vllm_neuron.weights.kv_scales import read_kv_scales, scale_weights
from vllm_neuron.weights.loading import CheckpointError


@pytest.mark.parametrize("layout", [LLM_COMPRESSOR, MODELOPT], ids=["llm-compressor", "ModelOpt"])
@pytest.mark.parametrize("as_vector", [False, True])
def test_both_layouts_are_read(layout: tuple[str, str], as_vector: bool, tmp_path: Path) -> None:
    scales = [[[x] if as_vector else x for x in pair] for pair in SCALES]
    folder = write_checkpoint_with_kv_scales(tmp_path / "model", layout, scales)
    found = read_kv_scales(folder, 2)
    assert found is not None and torch.equal(found, torch.tensor(SCALES))
    # A cache in the model's dtype has no use for them.
    load(folder)


def test_a_checkpoint_without_scales_has_none() -> None:
    assert read_kv_scales(checkpoint("llama"), 2) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.self_attn.k_scale", None, ["no scale of the keys of layers 1"]),
        ("model.layers.0.self_attn.v_scale", 0.0, ["layers.0.self_attn.v_scale is 0.0", "positive"]),
        ("model.layers.1.self_attn.v_scale", -0.5, ["layers.1.self_attn.v_scale is -0.5"]),
        ("model.layers.0.self_attn.k_scale", float("nan"), ["layers.0.self_attn.k_scale is nan"]),
        ("model.layers.0.self_attn.k_scale", [1.0, 2.0], ["has shape [2]", "one scale for all heads"]),
        ("model.layers.2.self_attn.k_scale", 1.0, ["is of no layer of the model, which has 2"]),
        ("model.layers.1.self_attn.k_proj.k_scale", 1.0, ["are the same scale", "layers.1.self_attn.k_scale"]),
    ],
)
def test_unusable_scales_name_the_layer(name: str, value: object, words: list[str], tmp_path: Path) -> None:
    file = write_checkpoint_with_kv_scales(tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = torch.tensor(value)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="unusable scales") as caught:
        read_kv_scales(tmp_path / "model", 2)
    assert all(word in str(caught.value) for word in [*words, "calibrate-kv"]), caught.value


def test_the_direction_is_turned_once() -> None:
    weights = scale_weights(torch.tensor([[0.5, 4.0]]), 448.0)
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        "layers.0.kv_quantize": [2.0, 0.25],
        "layers.0.kv_dequantize": [0.5, 4.0],
    }


def test_the_limit_is_that_of_the_hardware() -> None:
    assert [limit_of(platform) for platform in ("cpu", "trn2", "trn3")] == [448.0, 240.0, 448.0]
    assert (stretch_of(448.0), stretch_of(240.0)) == (1.0, 2.0)
    # What a scale maps to 448 is within 240 on Trainium 2, and reads as the same number.
    weights = scale_weights(torch.tensor([[0.5, 4.0]]), 240.0)
    assert weights["layers.0.kv_quantize"].tolist() == [1.0, 0.125]
    assert weights["layers.0.kv_dequantize"].tolist() == [1.0, 8.0]


def test_a_model_stores_half_of_bfloat16() -> None:
    model, _ = load(checkpoint("llama"))
    narrow = with_fp8_cache(model, 448.0)
    assert cache_dtype(narrow.kv_layers, torch.bfloat16) is FP8
    assert cache_dtype(model.kv_layers, torch.bfloat16) is torch.bfloat16
    assert 2 * block_bytes(narrow.kv_layers, 32, torch.bfloat16) == block_bytes(model.kv_layers, 32, torch.bfloat16)
    assert narrow.weight_table.keys() - model.weight_table.keys() == {
        f"layers.{layer}.kv_{name}" for layer in range(2) for name in ("quantize", "dequantize")
    }


@pytest.mark.parametrize("limit", [448.0, 240.0])
def test_logits_stay_near_those_of_an_exact_cache(limit: float, tmp_path: Path) -> None:
    folder = write_checkpoint_with_kv_scales(tmp_path / "model")
    model, weights = load_with_fp8_cache(folder, limit)
    ids = prompt(100, seed=3)
    table = shuffled_table()
    got, cache = prefill(model, weights, new_fp8_cache(model, 64), ids, table, [60, 40])
    exact = logits_oracle(checkpoint("llama"), ids)
    error = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    # Three bits of fraction are an error of 2 % of each number, which the sharp attention of random weights makes 15 %;
    # scales in the wrong direction would leave nothing of the logits.
    assert 1e-3 < error < 0.25, error
    assert all(half.dtype is FP8 and half.float().abs().max() <= limit for layer in cache for half in layer)
