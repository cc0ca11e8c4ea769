"""Prefill steps whose tokens are embeddings, in part or in whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fixtures import NUM_BLOCKS, random_weights, tiny_model
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.inputs import InputBuilder, Row
from vllm_neuron.kv_cache.layout import layer_shapes
from vllm_neuron.models.model import PromptEmbeddings, StepInputs

MODEL = tiny_model()
WEIGHTS = {**random_weights(MODEL), **MODEL.constants}
HIDDEN = MODEL.hidden_size
GRAPH = GraphSpec("prefill", 32, 1, 64, embeddings=True)
IDS = np.arange(1, 33, dtype=np.int32)
TABLE = WEIGHTS["embed"]


def builder(graph: GraphSpec = GRAPH, dtype: torch.dtype = torch.float32) -> InputBuilder:
    return InputBuilder(graph, 16, (None,), HIDDEN, dtype)


def row(ids: np.ndarray, embeddings: torch.Tensor | None = None, start: int = 0) -> Row:
    return Row(ids, start, (np.array([7, 3, 30, 11], dtype=np.int32),), embeddings=embeddings)


def logits(inputs: StepInputs) -> torch.Tensor:
    shapes = layer_shapes(MODEL.kv_layers, NUM_BLOCKS, 16)
    outputs, _ = MODEL.step(WEIGHTS, [(torch.zeros(s), torch.zeros(s)) for s in shapes], inputs)
    return outputs.logits


@given(count=st.integers(1, 32), embedded=st.integers(0, 32), start=st.integers(0, 32), left=st.integers(0, 32))
def test_the_mask_holds_the_given_rows_only(count: int, embedded: int, start: int, left: int) -> None:
    build = builder().build
    # Whatever an earlier step leaves behind, NaN included, is not of this step.
    build([row(IDS, torch.full((left, HIDDEN), torch.nan))])
    given_rows = torch.randn(min(embedded, count), HIDDEN)
    inputs = build([row(IDS[:count], given_rows if embedded else None, start)])
    assert isinstance(inputs.embeddings, PromptEmbeddings)
    assert inputs.embeddings.mask.tolist() == [index < len(given_rows) for index in range(32)]
    assert torch.equal(inputs.embeddings.values[: len(given_rows)], given_rows)
    ids = [0 if index < len(given_rows) else index + 1 for index in range(count)]
    assert inputs.token_ids.tolist() == ids + [0] * (32 - count)
    assert logits(inputs).isfinite().all()


@pytest.mark.parametrize("embedded", [1, 15, 16, 31, 32])
def test_rows_of_the_embedding_table_are_the_tokens(embedded: int) -> None:
    tokens = InputBuilder(GraphSpec("prefill", 32, 1, 64), 16, (None,)).build([row(IDS)])
    # The row's ids mean nothing where an embedding is given.
    ids = np.where(np.arange(32) < embedded, 1_000_000, IDS).astype(np.int32)
    mixed = builder().build([row(ids, TABLE[IDS[:embedded]])])
    assert torch.equal(logits(mixed), logits(tokens))
    assert torch.equal(logits(builder().build([row(IDS)])), logits(tokens))


def test_warm_up_has_the_form_of_a_step() -> None:
    build = builder(dtype=torch.bfloat16).build
    warm_up = build(()).embeddings
    assert isinstance(warm_up, PromptEmbeddings)
    assert (warm_up.values.dtype, warm_up.values.shape) == (torch.bfloat16, (32, HIDDEN))
    assert (warm_up.mask.dtype, warm_up.mask.shape) == (torch.bool, (32,))
    before = [tensor.data_ptr() for tensor in warm_up]
    step = build([row(IDS, torch.ones(3, HIDDEN, dtype=torch.bfloat16))])
    assert [tensor.data_ptr() for tensor in step.embeddings] == before


@pytest.mark.parametrize("graph", [GraphSpec("prefill", 32, 1, 64), GraphSpec("decode", 1, 1, 64)])
def test_other_graphs_take_no_embeddings(graph: GraphSpec) -> None:
    assert builder(graph).build(()).embeddings == ()
    with pytest.raises(ValueError, match="takes token ids only"):
        builder(graph).build([row(IDS[:1], torch.ones(1, HIDDEN))])


@pytest.mark.parametrize("shape", [(3, 1), (3, HIDDEN + 1), (5, HIDDEN), (HIDDEN,)])
def test_embeddings_that_do_not_fit_the_row_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="for 4 tokens of hidden size"):
        builder().build([row(IDS[:4], torch.ones(shape))])
