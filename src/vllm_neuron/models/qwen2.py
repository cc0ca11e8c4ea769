"""Qwen2 and Qwen2.5."""

from typing import Any

from vllm_neuron.models.hf_config import build_dense
from vllm_neuron.models.model import Model


def build(hf_config: Any, max_model_len: int | None = None) -> Model:
    """Qwen2ForCausalLM: a bias on queries, keys and values, nowhere else."""
    return build_dense(
        "Qwen2ForCausalLM", hf_config, max_model_len, qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False
    )
