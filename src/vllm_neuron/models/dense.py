"""The dense decoder: rotary grouped-query attention and a gated MLP, RMS norms before each.

Llama, Qwen2 and Qwen3 are this with other switches. Shape letters: T tokens, R rows with logits, H hidden,
N query heads, K KV heads, D head size, I MLP width, V vocabulary, L layers.
"""

from dataclasses import dataclass
from functools import partial

import torch

from vllm_neuron import nn
from vllm_neuron.kv_cache.layout import KVCache, KVLayerSpec, LayerCache, pool_indexes, with_groups
from vllm_neuron.models.fp8_cache import kv_scales
from vllm_neuron.models.model import Model, StepInputs, input_embeddings
from vllm_neuron.models.rope_scaling import RopeTable
from vllm_neuron.weights.table import Weights, WeightSpec, WeightTable

INV_FREQ = "rope.inv_freq"


@dataclass(frozen=True)
class DenseConfig:
    """Sizes and switches of one dense decoder.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        mlp_size: I.
        num_layers: L.
        num_heads: N.
        num_kv_heads: K.
        head_dim: D, not necessarily H / N.
        norm_eps: epsilon of every RMS norm.
        rope_scale: factor of rotary cosines and sines.
        tied_embeddings: the embedding is the output projection too.
        qkv_bias, out_bias, mlp_bias: which products have a bias.
        qk_norm: RMS norm of each query and key head before the rotary embedding.
        windows: per layer how many tokens it looks back on, its own included; None is all of them.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_scale: float
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]

    @property
    def kv_layers(self) -> tuple[KVLayerSpec, ...]:
        """What each layer keeps in the KV cache."""
        return with_groups(KVLayerSpec(self.num_kv_heads, self.head_dim, window) for window in self.windows)


def build(architecture: str, config: DenseConfig, rope: RopeTable) -> Model:
    """The model `architecture` at `config`."""
    return Model(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        weight_table=weight_table(config),
        constants={INV_FREQ: rope.inv_freq},
        kv_layers=config.kv_layers,
        forward=partial(forward, config),
        residual_stream=partial(residual_stream, config),
        logits=partial(logits, config),
    )


def weight_table(config: DenseConfig) -> WeightTable:
    """Every weight of the model, under flat names such as "layers.0.qkv"."""
    vocab, hidden = config.vocab_size, config.hidden_size
    axes, names = ("vocab", "hidden"), ("model.embed_tokens.weight",)
    table = {"embed": WeightSpec((vocab, hidden), axes, names, looked_up=not config.tied_embeddings)}
    for layer in range(config.num_layers):
        table |= _layer_table(config, layer)
    table["final_norm"] = WeightSpec((hidden,), ("hidden",), ("model.norm.weight",))
    if not config.tied_embeddings:
        table["lm_head"] = WeightSpec((vocab, hidden), axes, ("lm_head.weight",))
    return table


def _layer_table(config: DenseConfig, layer: int) -> dict[str, WeightSpec]:
    hidden, mlp, dim = config.hidden_size, config.mlp_size, config.head_dim
    heads, qkv = config.num_heads * dim, (config.num_heads + 2 * config.num_kv_heads) * dim
    table: dict[str, WeightSpec] = {}

    def vector(name: str, size: int, axis: str, *sources: str) -> None:
        names = tuple(f"model.layers.{layer}.{source}" for source in sources)
        table[f"layers.{layer}.{name}"] = WeightSpec((size,), (axis,), names)

    def product(name: str, shape: tuple[int, int], axes: tuple[str, str], bias: bool, *sources: str) -> None:
        names = tuple(f"model.layers.{layer}.{source}.weight" for source in sources)
        table[f"layers.{layer}.{name}"] = WeightSpec(shape, axes, names)
        if bias:
            vector(f"{name}_bias", shape[0], axes[0], *(f"{source}.bias" for source in sources))

    vector("attn_norm", hidden, "hidden", "input_layernorm.weight")
    qkv_sources = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    product("qkv", (qkv, hidden), ("qkv", "hidden"), config.qkv_bias, *qkv_sources)
    if config.qk_norm:
        vector("q_norm", dim, "head_dim", "self_attn.q_norm.weight")
        vector("k_norm", dim, "head_dim", "self_attn.k_norm.weight")
    product("out", (hidden, heads), ("hidden", "heads"), config.out_bias, "self_attn.o_proj")
    vector("mlp_norm", hidden, "hidden", "post_attention_layernorm.weight")
    product("gate_up", (2 * mlp, hidden), ("mlp", "hidden"), config.mlp_bias, "mlp.gate_proj", "mlp.up_proj")
    product("down", (hidden, mlp), ("hidden", "mlp"), config.mlp_bias, "mlp.down_proj")
    return table


def forward(
    config: DenseConfig, weights: Weights, kv_cache: KVCache, inputs: StepInputs
) -> tuple[torch.Tensor, KVCache]:
    """Hidden states [T, H] after the final norm, and the cache with this step's keys and values."""
    hidden, _, new_cache = residual_stream(config, weights, kv_cache, inputs)
    return hidden, new_cache


def residual_stream(
    config: DenseConfig, weights: Weights, kv_cache: KVCache, inputs: StepInputs
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], KVCache]:
    """`forward`, and between its two results the residual [T, H] before the first layer and after each: L + 1."""
    cos, sin = nn.rope_tables(inputs.positions, weights[INV_FREQ], config.rope_scale)
    residual = input_embeddings(inputs, weights["embed"])
    normed = nn.rms_norm(residual, weights["layers.0.attn_norm"], config.norm_eps)
    residuals, new_cache, kv_layers = [residual], list(kv_cache), config.kv_layers
    for layer, pool in enumerate(pool_indexes(kv_layers)):
        prefix = f"layers.{layer}."
        attended, new_cache[pool] = _attention(
            config, weights, layer, kv_layers[layer], normed, cos, sin, new_cache[pool], inputs
        )
        normed, residual = nn.add_rms_norm(attended, residual, weights[prefix + "mlp_norm"], config.norm_eps)
        gate_up = nn.linear(normed, weights[prefix + "gate_up"], weights.get(prefix + "gate_up_bias"))
        mixed = nn.linear(nn.silu_mul(gate_up), weights[prefix + "down"], weights.get(prefix + "down_bias"))
        last = layer == config.num_layers - 1
        next_norm = "final_norm" if last else f"layers.{layer + 1}.attn_norm"
        normed, residual = nn.add_rms_norm(mixed, residual, weights[next_norm], config.norm_eps)
        residuals.append(residual)
    return normed, tuple(residuals), new_cache


def _attention(
    config: DenseConfig,
    weights: Weights,
    layer: int,
    kv_layer: KVLayerSpec,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    inputs: StepInputs,
) -> tuple[torch.Tensor, LayerCache]:
    """x [T, H] through one attention block: [T, H], and the layer's new cache."""
    prefix, scales = f"layers.{layer}.", kv_scales(weights, layer)
    tokens, heads, kv_heads, dim = x.shape[0], config.num_heads, config.num_kv_heads, config.head_dim
    qkv = nn.linear(x, weights[prefix + "qkv"], weights.get(prefix + "qkv_bias"))
    qkv = qkv.view(tokens, heads + 2 * kv_heads, dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    if config.qk_norm:
        q = nn.rms_norm(q, weights[prefix + "q_norm"], config.norm_eps)
        k = nn.rms_norm(k, weights[prefix + "k_norm"], config.norm_eps)
    q, k = nn.rope(q, k, cos, sin)
    group, window = kv_layer.group, kv_layer.window
    k_cache, v_cache = nn.kv_write(*cache, k, v, inputs.slot_mappings[group], scales)
    table, positions = inputs.block_tables[group], inputs.positions_in_table(group)
    out = nn.paged_attention(q, k_cache, v_cache, table, positions, dim**-0.5, window, scales=scales)
    out = nn.linear(out.reshape(tokens, heads * dim), weights[prefix + "out"], weights.get(prefix + "out_bias"))
    return out, (k_cache, v_cache)


def logits(config: DenseConfig, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Scores [R, V] float32 of every token after hidden [R, H]."""
    return nn.logits(hidden, weights["embed" if config.tied_embeddings else "lm_head"])
