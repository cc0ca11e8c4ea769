"""Drives a model over a paged cache the way an engine does, with plain tensors."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from vllm_neuron.kv_cache.layout import KVCache
from vllm_neuron.models.model import Model, StepInputs
from vllm_neuron.models.registry import build_model
from vllm_neuron.weights.loading import load_weights

BLOCK_SIZE = 8
Weights = dict[str, torch.Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, Weights]:
    """The model of a checkpoint folder and its weights, constants included."""
    model = build_model(AutoConfig.from_pretrained(folder))
    return model, {**load_weights(folder, model.weight_table, dtype), **model.constants}


def new_cache(model: Model, num_blocks: int = 64, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache whose every element is `fill`."""
    shapes = [(num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim) for spec in model.kv_layers]
    return [(torch.full(shape, fill, dtype=dtype), torch.full(shape, fill, dtype=dtype)) for shape in shapes]


def shuffled_table(num_blocks: int = 64, width: int = 16, seed: int = 0) -> list[int]:
    """`width` physical blocks in no order, the null block not among them."""
    return (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))[:width]).tolist()


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill_inputs(token_ids: list[int], start: int, table: list[int], bucket: int) -> StepInputs:
    """One request's rows from position `start` on, padded to `bucket` rows; logits of the last real row."""
    count = len(token_ids)
    padding = bucket - count
    positions = list(range(start, start + count))
    slots = [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in positions]
    return StepInputs(
        token_ids=int32(token_ids + [0] * padding),
        positions=int32(positions + positions[-1:] * padding),
        block_tables=(int32([table]),),
        slot_mappings=(int32(slots + [row % BLOCK_SIZE for row in range(padding)]),),
        logits_rows=int32([count - 1]),
    )


def decode_inputs(token_ids: list[int], positions: list[int], tables: list[list[int]], bucket: int) -> StepInputs:
    """One row for each request, padded to `bucket` requests."""
    padding = bucket - len(token_ids)
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for table, position in zip(tables, positions, strict=True)
    ]
    width = len(tables[0])
    return StepInputs(
        token_ids=int32(token_ids + [0] * padding),
        positions=int32(positions + [0] * padding),
        block_tables=(int32(tables + [[0] * width] * padding),),
        slot_mappings=(int32(slots + [0] * padding),),
        logits_rows=int32(list(range(bucket))),
    )


def prefill(
    model: Model, weights: Weights, cache: KVCache, token_ids: list[int], table: list[int], chunks: list[int]
) -> tuple[torch.Tensor, KVCache]:
    """The logits [T, V] of every token of a prompt that is split into `chunks` (which sum to its length)."""
    rows, start = [], 0
    for chunk in chunks:
        inputs = prefill_inputs(token_ids[start : start + chunk], start, table, bucket=chunk)
        outputs, cache = model.step(weights, cache, inputs)
        rows.append(model.logits(weights, outputs.hidden))
        start += chunk
    return torch.cat(rows), cache
