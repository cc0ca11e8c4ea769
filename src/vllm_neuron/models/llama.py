"""Llama 2 and 3.x."""

from typing import Any

from vllm_neuron.models.hf_config import build_dense
from vllm_neuron.models.model import Model


def build(hf_config: Any, max_model_len: int | None = None) -> Model:
    """LlamaForCausalLM: biases only where the configuration says so."""
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    return build_dense(
        "LlamaForCausalLM",
        hf_config,
        max_model_len,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
        qk_norm=False,
    )
