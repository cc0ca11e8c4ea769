"""A whole model step on a KV cache full of canaries: padding changes no live block and no live row."""

import numpy as np
import pytest
import torch

from tests.engine.fixtures import NUM_BLOCKS, random_weights, tiny_model
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.inputs import InputBuilder, Row
from vllm_neuron.kv_cache.layout import layer_shapes
from vllm_neuron.models.model import StepOutputs

BLOCK_SIZE = 16
KVPairs = list[tuple[torch.Tensor, torch.Tensor]]

MODEL = tiny_model()
WEIGHTS = {**random_weights(MODEL), **MODEL.constants}
BLOCKS = ([7, 3, 30, 11], [5, 22, 9, 2], [1, 39, 17, 4], [12, 8, 33, 20])


def canaries() -> KVPairs:
    generator = torch.Generator().manual_seed(1)
    shapes = layer_shapes(MODEL.kv_layers, NUM_BLOCKS, BLOCK_SIZE)
    return [(torch.randn(s, generator=generator), torch.randn(s, generator=generator)) for s in shapes]


def row(request: int, start: int, count: int) -> Row:
    token_ids = (np.arange(start, start + count, dtype=np.int32) * 7 + request * 13) % 90 + 1
    return Row(token_ids, start, (np.array(BLOCKS[request], dtype=np.int32),))


def run(graph: GraphSpec, rows: list[Row]) -> tuple[StepOutputs, set[int]]:
    """The step's outputs, and the slots whose keys or values it changed in any layer."""
    before = canaries()
    inputs = InputBuilder(graph, BLOCK_SIZE, (None,)).build(rows)
    outputs, after = MODEL.step(WEIGHTS, [(k.clone(), v.clone()) for k, v in before], inputs)
    changed: set[int] = set()
    for old, new in zip(before, after, strict=True):
        for a, b in zip(old, new, strict=True):
            differs = (a != b).flatten(2).any(-1).flatten()
            changed.update(differs.nonzero().flatten().tolist())
    return outputs, changed


def slots_of(rows: list[Row]) -> set[int]:
    positions = [(r, p) for r in rows for p in range(r.start, r.end)]
    return {int(r.block_ids[0][p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for r, p in positions}


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32])
@pytest.mark.parametrize("start", [0, 5, 16, 31])
def test_prefill_changes_its_own_slots_only(start: int, tokens: int) -> None:
    rows = [row(1, start, tokens)]
    _, changed = run(GraphSpec("prefill", 32, 1, 64), rows)
    assert changed - {0} == slots_of(rows)
    assert (0 in changed) == (tokens < 32)


@pytest.mark.parametrize("live", [1, 2, 3, 4])
def test_decode_changes_its_own_slots_only(live: int) -> None:
    rows = [row(request, start, 1) for request, start in zip(range(live), [0, 15, 16, 50], strict=False)]
    _, changed = run(GraphSpec("decode", 4, 4, 64), rows)
    assert changed - {0} == slots_of(rows)
    assert (0 in changed) == (live < 4)


def test_warm_up_changes_the_null_block_only() -> None:
    for graph in (GraphSpec("prefill", 32, 1, 64), GraphSpec("decode", 4, 4, 64)):
        outputs, changed = run(graph, [])
        assert changed == {0}
        assert outputs.logits.isfinite().all()


@pytest.mark.parametrize("start", [0, 5, 16])
def test_prefill_rows_are_bitwise_equal_with_and_without_padding(start: int) -> None:
    graph = GraphSpec("prefill", 32, 1, 64)
    full, _ = run(graph, [row(2, start, 32)])
    for live in (1, 9, 16, 31):
        padded, _ = run(graph, [row(2, start, live)])
        assert torch.equal(padded.hidden[:live], full.hidden[:live])


def test_decode_rows_are_bitwise_equal_with_and_without_padding() -> None:
    graph = GraphSpec("decode", 4, 4, 64)
    rows = [row(request, start, 1) for request, start in enumerate([3, 15, 16, 50])]
    full, _ = run(graph, rows)
    for live in (1, 2, 3):
        padded, _ = run(graph, rows[:live])
        assert torch.equal(padded.logits[:live], full.logits[:live])
        assert torch.equal(padded.hidden[:live], full.hidden[:live])
