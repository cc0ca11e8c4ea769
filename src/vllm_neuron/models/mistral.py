"""Mistral 7B and its kin."""

from typing import Any

from vllm_neuron.models.hf_config import build_dense
from vllm_neuron.models.model import Model


def build(hf_config: Any, max_model_len: int | None = None) -> Model:
    """MistralForCausalLM: no bias anywhere; every layer looks back on `sliding_window` tokens, or all if it is null."""
    return build_dense(
        "MistralForCausalLM",
        hf_config,
        max_model_len,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(hf_config.sliding_window,) * hf_config.num_hidden_layers,
    )
