"""The model's attention layers in the terms of vLLM's block manager."""

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec

from vllm_neuron.kv_cache.layout import KVLayerSpec, num_groups
from vllm_neuron.models.model import Model


def kv_cache_specs(model: Model, block_size: int, dtype: torch.dtype) -> dict[str, KVCacheSpec]:
    """One entry per layer, by name; ``dtype`` is that of layers which have none of their own."""
    return {layer_name(index): _spec(layer, block_size, dtype) for index, layer in enumerate(model.kv_layers)}


def layer_name(index: int) -> str:
    """Name of an attention layer, unique in the model."""
    return f"layers.{index}.attention"


def require_groups(kv_cache_config: KVCacheConfig, model: Model) -> None:
    """Check that vLLM has grouped the layers as the model expects its block tables.

    Raises:
        RuntimeError: it has not.
    """
    found = {name: group for group, spec in enumerate(kv_cache_config.kv_cache_groups) for name in spec.layer_names}
    wanted = {layer_name(index): layer.group for index, layer in enumerate(model.kv_layers)}
    sizes = {spec.kv_cache_spec.block_size for spec in kv_cache_config.kv_cache_groups}
    if found != wanted or len(kv_cache_config.kv_cache_groups) != num_groups(model.kv_layers) or len(sizes) > 1:
        raise RuntimeError(
            f"vLLM has grouped the attention layers of {model.architecture} as {found}, in blocks of {sizes} tokens, "
            f"and its block tables are made for {wanted}, in blocks of one size."
        )


def _spec(layer: KVLayerSpec, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
    sizes = {"block_size": block_size, "num_kv_heads": layer.num_kv_heads, "head_size": layer.head_dim}
    dtype = layer.dtype or dtype
    if layer.window is None:
        return FullAttentionSpec(**sizes, dtype=dtype)
    return SlidingWindowSpec(**sizes, dtype=dtype, sliding_window=layer.window)
