"""A model with its KV cache in 8-bit floats: the same model, plus the scales of each layer among its weights."""

from dataclasses import replace

import torch

from vllm_neuron.kernels.kv_fp8_torch import FP8, KVScales
from vllm_neuron.models.model import Model
from vllm_neuron.weights.kv_scales import DEQUANTIZE, QUANTIZE
from vllm_neuron.weights.table import Weights, WeightSpec

LIMIT = "kv_limit"
"""Name of the constant that holds the largest magnitude of the cache."""


def with_fp8_cache(model: Model, limit: float) -> Model:
    """The model with keys and values stored as float8_e4m3fn.

    Args:
        model: its `forward` hands `kv_scales` to `nn.kv_write` and `nn.paged_attention`.
        limit: the largest magnitude that is stored, see `kv_cache.fp8.limit_of`.
    """
    scales = {
        f"layers.{layer}.{name}": WeightSpec((2,), ("keys_values",), (), torch.float32)
        for layer in range(len(model.kv_layers))
        for name in (QUANTIZE, DEQUANTIZE)
    }
    return replace(
        model,
        weight_table={**model.weight_table, **scales},
        constants={**model.constants, LIMIT: torch.tensor([limit])},
        kv_layers=tuple(replace(layer, dtype=FP8) for layer in model.kv_layers),
    )


def kv_scales(weights: Weights, layer: int) -> KVScales | None:
    """The scales of a layer's cache; None where the cache has the model's dtype."""
    if LIMIT not in weights:
        return None
    return KVScales(weights[f"layers.{layer}.{QUANTIZE}"], weights[f"layers.{layer}.{DEQUANTIZE}"], weights[LIMIT])
