"""Rotary frequencies against transformers, in both spellings of its configuration."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_neuron.models.errors import UnsupportedModelError
from vllm_neuron.models.rope_scaling import rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    LLAMA3,
    LLAMA3 | {"factor": 8.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "truncate": False},
]


@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: f"{scaling['rope_type']}-{len(scaling)}")
def test_frequencies_match_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=dict(scaling),
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    for spelling in (
        {"rope_theta": 500000.0, "rope_scaling": scaling},
        {"rope_parameters": {**scaling, "rope_theta": 500000.0}},
    ):
        table = rope_table(SimpleNamespace(max_position_embeddings=131072, **spelling), head_dim, None)
        torch.testing.assert_close(table.inv_freq, inv_freq, atol=0, rtol=1e-6)
        assert table.inv_freq.dtype == torch.float32
        assert table.scale == pytest.approx(scale)


def test_dynamic_scaling_is_plain_up_to_the_trained_length_and_refused_past_it() -> None:
    config = SimpleNamespace(max_position_embeddings=2048, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert torch.equal(
        rope_table(config, 64, 2048).inv_freq,
        rope_table(SimpleNamespace(max_position_embeddings=2048), 64, 2048).inv_freq,
    )
    with pytest.raises(UnsupportedModelError, match=r"max_model_len=4096.*--max-model-len 2048 or less"):
        rope_table(config, 64, 4096)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "not supported yet: .*'longrope'.*llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}}, "original_max_position_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer type .full_attention"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        rope_table(SimpleNamespace(max_position_embeddings=2048, **settings), 64, None)


def test_an_odd_head_size_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="head_dim=15"):
        rope_table(SimpleNamespace(max_position_embeddings=2048), 15, None)
