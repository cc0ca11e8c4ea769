"""Drives a model over a paged cache the way an engine does, with plain tensors."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from vllm_neuron.kv_cache.layout import NULL_BLOCK, KVCache, layer_shapes, num_groups
from vllm_neuron.models.model import Model, StepInputs
from vllm_neuron.models.registry import build_model
from vllm_neuron.weights.loading import load_weights

BLOCK_SIZE = 8
GROUP_BLOCKS = 64
"""Block b of a table is block b + GROUP_BLOCKS * g of KV group g, but for the null block."""
Weights = dict[str, torch.Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, Weights]:
    """The model of a checkpoint folder and its weights, constants included."""
    model = build_model(AutoConfig.from_pretrained(folder))
    return model, {**load_weights(folder, model.weight_table, dtype), **model.constants}


def new_cache(
    model: Model, num_blocks: int = GROUP_BLOCKS, fill: float = 0.0, dtype: torch.dtype = torch.float32
) -> KVCache:
    """A cache whose every element is `fill`."""
    shapes = layer_shapes(model.kv_layers, num_blocks * num_groups(model.kv_layers), BLOCK_SIZE)
    return [(torch.full(shape, fill, dtype=dtype), torch.full(shape, fill, dtype=dtype)) for shape in shapes]


def shuffled_table(num_blocks: int = 64, width: int = 16, seed: int = 0) -> list[int]:
    """`width` physical blocks in no order, the null block not among them."""
    return (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))[:width]).tolist()


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def of_groups(table: list[int], groups: int) -> list[list[int]]:
    """The block table of each KV group."""
    return [
        [block + GROUP_BLOCKS * group if block != NULL_BLOCK else block for block in table] for group in range(groups)
    ]


def slot(table: list[int], position: int) -> int:
    """Where the keys and values of a position go."""
    return table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def prefill_inputs(token_ids: list[int], start: int, table: list[int], bucket: int, groups: int = 1) -> StepInputs:
    """One request's rows from position `start` on, padded to `bucket` rows; logits of the last real row."""
    count = len(token_ids)
    padding = bucket - count
    positions = list(range(start, start + count))
    unused = [row % BLOCK_SIZE for row in range(padding)]
    tables = of_groups(table, groups)
    return StepInputs(
        token_ids=int32(token_ids + [0] * padding),
        positions=int32(positions + positions[-1:] * padding),
        block_tables=tuple(int32([table]) for table in tables),
        slot_mappings=tuple(int32([slot(table, position) for position in positions] + unused) for table in tables),
        logits_rows=int32([count - 1]),
    )


def decode_inputs(
    token_ids: list[int], positions: list[int], tables: list[list[int]], bucket: int, groups: int = 1
) -> StepInputs:
    """One row for each request, padded to `bucket` requests."""
    padding = bucket - len(token_ids)
    by_group = list(zip(*(of_groups(table, groups) for table in tables), strict=True))
    unused = [[NULL_BLOCK] * len(tables[0])] * padding
    slots = [[slot(table, p) for table, p in zip(group, positions, strict=True)] for group in by_group]
    return StepInputs(
        token_ids=int32(token_ids + [0] * padding),
        positions=int32(positions + [0] * padding),
        block_tables=tuple(int32([*group, *unused]) for group in by_group),
        slot_mappings=tuple(int32(group + [0] * padding) for group in slots),
        logits_rows=int32(list(range(bucket))),
    )


def prefill(
    model: Model, weights: Weights, cache: KVCache, token_ids: list[int], table: list[int], chunks: list[int]
) -> tuple[torch.Tensor, KVCache]:
    """The logits [T, V] of every token of a prompt that is split into `chunks` (which sum to its length)."""
    rows, start, groups = [], 0, num_groups(model.kv_layers)
    for chunk in chunks:
        inputs = prefill_inputs(token_ids[start : start + chunk], start, table, chunk, groups)
        outputs, cache = model.step(weights, cache, inputs)
        rows.append(model.logits(weights, outputs.hidden))
        start += chunk
    return torch.cat(rows), cache
