"""Qwen3, dense."""

from typing import Any

from vllm_neuron.models.hf_config import build_dense
from vllm_neuron.models.model import Model


def build(hf_config: Any, max_model_len: int | None = None) -> Model:
    """Qwen3ForCausalLM: every query and key head is normed before the rotary embedding."""
    bias = bool(getattr(hf_config, "attention_bias", False))
    return build_dense(
        "Qwen3ForCausalLM", hf_config, max_model_len, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=True
    )
