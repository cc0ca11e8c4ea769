"""Helium (Kyutai), for vllm-neuron.

A decoder like Llama's, but its rotary embedding turns neighbouring dimensions (2i, 2i + 1) together, where the building
block turns i and i + D/2.

Shape letters: T tokens, R rows with logits, H hidden, N query heads, K KV heads, D head size, V vocabulary.
"""

from functools import partial
from typing import Any

import torch

from vllm_neuron import nn
from vllm_neuron.kv_cache.layout import KVCache, KVLayerSpec, LayerCache
from vllm_neuron.models.errors import UnsupportedModelError
from vllm_neuron.models.model import Model, StepInputs, input_embeddings
from vllm_neuron.models.rope_scaling import rope_table
from vllm_neuron.weights.table import Weights, WeightSpec, WeightTable


def build(hf_config: Any, max_model_len: int | None) -> Model:
    """HeliumForCausalLM at a transformers HeliumConfig.

    Raises:
        UnsupportedModelError: the configuration asks for biases or another activation, which no published Helium has.
    """
    if hf_config.attention_bias or hf_config.mlp_bias or hf_config.hidden_act != "silu":
        raise UnsupportedModelError("Helium is supported without biases and with hidden_act='silu' only")
    rope = rope_table(hf_config, hf_config.head_dim, max_model_len)
    return Model(
        architecture="HeliumForCausalLM",
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        weight_table=weight_table(hf_config),
        constants={"inv_freq": rope.inv_freq},
        kv_layers=(KVLayerSpec(hf_config.num_key_value_heads, hf_config.head_dim),) * hf_config.num_hidden_layers,
        forward=partial(forward, hf_config, rope.scale),
        logits=partial(logits, hf_config),
    )


def weight_table(config: Any) -> WeightTable:
    """Every weight once: its shape, its logical axes, and the checkpoint's tensors that make it."""
    embedding = ((config.vocab_size, config.hidden_size), ("vocab", "hidden"))
    table = {"embed": WeightSpec(*embedding, ("model.embed_tokens.weight",))}
    for layer in range(config.num_hidden_layers):
        table |= layer_table(config, layer)
    table["norm"] = WeightSpec((config.hidden_size,), ("hidden",), ("model.norm.weight",))
    if not config.tie_word_embeddings:
        table["head"] = WeightSpec(*embedding, ("lm_head.weight",))
    return table


def layer_table(config: Any, layer: int) -> dict[str, WeightSpec]:
    """The weights of one layer. Several names of the checkpoint are concatenated along dimension 0."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    qkv = heads + 2 * config.num_key_value_heads * config.head_dim

    def spec(shape: tuple[int, ...], axes: tuple[str, ...], *names: str) -> WeightSpec:
        return WeightSpec(shape, axes, tuple(f"model.layers.{layer}.{name}.weight" for name in names))

    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return {
        f"{layer}.attn_norm": spec((hidden,), ("hidden",), "input_layernorm"),
        f"{layer}.qkv": spec((qkv, hidden), ("qkv", "hidden"), *projections),
        f"{layer}.out": spec((hidden, heads), ("hidden", "heads"), "self_attn.o_proj"),
        f"{layer}.mlp_norm": spec((hidden,), ("hidden",), "post_attention_layernorm"),
        f"{layer}.gate_up": spec((2 * mlp, hidden), ("mlp", "hidden"), "mlp.gate_proj", "mlp.up_proj"),
        f"{layer}.down": spec((hidden, mlp), ("hidden", "mlp"), "mlp.down_proj"),
    }


def forward(
    config: Any, rope_scale: float, weights: Weights, kv_cache: KVCache, inputs: StepInputs
) -> tuple[torch.Tensor, KVCache]:
    """Hidden states [T, H] after the final norm, and the cache with this step's keys and values."""
    x = input_embeddings(inputs, weights["embed"])
    tables = nn.rope_tables(inputs.positions, weights["inv_freq"], rope_scale)
    new_cache = []
    for layer in range(config.num_hidden_layers):
        normed = nn.rms_norm(x, weights[f"{layer}.attn_norm"], config.rms_norm_eps)
        attended, cache = attention(config, weights, layer, normed, tables, kv_cache[layer], inputs)
        new_cache.append(cache)
        normed, x = nn.add_rms_norm(attended, x, weights[f"{layer}.mlp_norm"], config.rms_norm_eps)
        gate_up = nn.linear(normed, weights[f"{layer}.gate_up"])
        x = x + nn.linear(nn.silu_mul(gate_up), weights[f"{layer}.down"])
    return nn.rms_norm(x, weights["norm"], config.rms_norm_eps), new_cache


def attention(
    config: Any,
    weights: Weights,
    layer: int,
    x: torch.Tensor,
    rope_tables: tuple[torch.Tensor, torch.Tensor],
    cache: LayerCache,
    inputs: StepInputs,
) -> tuple[torch.Tensor, LayerCache]:
    """x [T, H] through one attention block: [T, H], and the layer's new cache."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = nn.linear(x, weights[f"{layer}.qkv"]).view(len(x), heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    q, k = nn.rope(halves(q), halves(k), *rope_tables)
    k_cache, v_cache = nn.kv_write(*cache, k, v, inputs.slot_mappings[0])
    mixed = nn.paged_attention(q, k_cache, v_cache, inputs.block_tables[0], inputs.positions, dim**-0.5)
    return nn.linear(mixed.reshape(len(x), heads * dim), weights[f"{layer}.out"]), (k_cache, v_cache)


def halves(x: torch.Tensor) -> torch.Tensor:
    """x [T, N, D] with dimension 2i at i and 2i + 1 at i + D/2. Reordering q and k alike keeps their products."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def logits(config: Any, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Scores [R, V] float32 of every token after hidden [R, H]."""
    return nn.logits(hidden, weights["embed" if config.tie_word_embeddings else "head"])
