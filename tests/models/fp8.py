"""Tiny checkpoints with scales of an FP8 KV cache, and what a model with such a cache computes, in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.checkpoints import write_checkpoint
from tests.models.paging import BLOCK_SIZE, Weights, decode_inputs, prefill_inputs
from vllm_neuron.kernels.kv_fp8_torch import FP8
from vllm_neuron.kv_cache.layout import KVCache
from vllm_neuron.models.fp8_cache import with_fp8_cache
from vllm_neuron.models.model import Model
from vllm_neuron.models.registry import build_model
from vllm_neuron.weights.kv_scales import read_kv_scales, scale_weights
from vllm_neuron.weights.loading import load_weights

LLM_COMPRESSOR = ("self_attn.k_scale", "self_attn.v_scale")
MODELOPT = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
OF_LLM_COMPRESSOR = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV_SCHEME}
OF_MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
SCALES = [[0.02, 0.03], [0.025, 0.015]]
"""Of keys and values of the two layers, whose largest magnitudes are about 7."""


def write_checkpoint_with_kv_scales(
    folder: Path, layout: tuple[str, str] = LLM_COMPRESSOR, scales: Any = SCALES, **overrides: Any
) -> Path:
    """A tiny Llama whose layers have these scales [L, 2], under the names of a layout."""
    write_checkpoint(folder, **overrides)
    tensors = load_file(folder / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip(layout, pair, strict=True):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if layout == MODELOPT:
        (folder / "hf_quant_config.json").write_text(json.dumps(OF_MODELOPT))
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": OF_LLM_COMPRESSOR}))
    return folder


def load_with_fp8_cache(folder: Path, limit: float = 448.0) -> tuple[Model, Weights]:
    """The model of a checkpoint with its cache in FP8, and its weights in float32."""
    model = with_fp8_cache(build_model(AutoConfig.from_pretrained(folder)), limit)
    scales = read_kv_scales(folder, len(model.kv_layers))
    assert scales is not None
    weights = load_weights(folder, model.weight_table, torch.float32)
    return model, {**weights, **scale_weights(scales, limit), **model.constants}


def new_fp8_cache(model: Model, num_blocks: int) -> KVCache:
    shapes = [(num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim) for spec in model.kv_layers]
    return [(torch.zeros(shape).to(FP8), torch.zeros(shape).to(FP8)) for shape in shapes]


def greedy_with_fp8_cache(folder: Path, token_ids: list[int], n: int) -> list[int]:
    """The n tokens that greedy decoding appends, by the torch twins and a cache in FP8."""
    model, weights = load_with_fp8_cache(folder)
    width = (len(token_ids) + n) // BLOCK_SIZE + 1
    table = list(range(1, width + 1))
    cache, found, chunk = new_fp8_cache(model, width + 1), [], 512
    for start in range(0, len(token_ids), chunk):
        piece = token_ids[start : start + chunk]
        outputs, cache = model.step(weights, cache, prefill_inputs(piece, start, table, len(piece)))
    for position in range(len(token_ids), len(token_ids) + n):
        found.append(int(outputs.logits[0].argmax()))
        outputs, cache = model.step(weights, cache, decode_inputs(found[-1:], [position], [table], 1))
    return found
