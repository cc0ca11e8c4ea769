"""The list of graphs, and the choice of the graph for a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fixtures import config
from vllm_neuron.engine.graphs import (
    GraphSpec,
    NoBucketError,
    decode_graph,
    list_graphs,
    prefill_graph,
    prompt_logits_graph,
)


def test_list_by_hand() -> None:
    assert [graph.name for graph in list_graphs(config())] == [
        "prefill_t32_ctx256",
        "prefill_t16_ctx256",
        "decode_b4_ctx256",
        "decode_b4_ctx128",
        "decode_b2_ctx256",
        "decode_b2_ctx128",
        "decode_b1_ctx256",
        "decode_b1_ctx128",
        "prompt_logits_t16",
    ]


def test_prefill_graphs_alone_take_embeddings() -> None:
    graphs = list_graphs(config(enable_prompt_embeds=True))
    assert [graph.name for graph in graphs if graph.embeddings] == [
        "prefill_t32_ctx256_embeds",
        "prefill_t16_ctx256_embeds",
    ]
    rest = {graph for graph in graphs if not graph.embeddings}
    assert rest == {graph for graph in list_graphs(config()) if graph.kind != "prefill"}


def test_contexts_are_whole_blocks_and_equal_ones_count_once() -> None:
    graphs = list_graphs(config(max_model_len=300, decode_context_length_buckets=(128, 256, 300), block_size=256))
    assert {graph.context for graph in graphs if graph.kind == "decode"} == {256, 512}
    assert {graph.context for graph in graphs if graph.kind == "prefill"} == {512}
    assert len(set(graphs)) == len(graphs) == 2 + 3 * 2 + 1


def test_largest_come_first() -> None:
    graphs = list_graphs(config(num_seqs_buckets=(1, 64), max_num_seqs=64))
    sizes = [graph.tokens * graph.context for graph in graphs]
    assert sizes == sorted(sizes, reverse=True)
    assert graphs[0].name == "decode_b64_ctx256"


@given(tokens=st.integers(1, 32))
def test_prefill_takes_the_smallest_that_fits(tokens: int) -> None:
    assert prefill_graph(list_graphs(config()), tokens).tokens == (16 if tokens <= 16 else 32)


@given(requests=st.integers(1, 4), context=st.integers(1, 256))
def test_decode_takes_the_smallest_that_fits(requests: int, context: int) -> None:
    expected_batch = {1: 1, 2: 2, 3: 4, 4: 4}[requests]
    expected_context = 128 if context <= 128 else 256
    assert decode_graph(list_graphs(config()), requests, context) == GraphSpec(
        "decode", expected_batch, expected_batch, expected_context
    )


def test_prompt_logits_has_the_rows_of_the_smallest_token_bucket() -> None:
    assert prompt_logits_graph(list_graphs(config())) == GraphSpec("prompt_logits", 16, 1, 0)


def test_a_step_that_nothing_fits_is_refused_and_never_clamped() -> None:
    graphs = list_graphs(config())
    with pytest.raises(NoBucketError, match=r"exceeds largest bucket.* 33 tokens.*num_batched_tokens_buckets is 32"):
        prefill_graph(graphs, 33)
    with pytest.raises(NoBucketError, match=r"exceeds largest bucket.* 5 requests.*num_seqs_buckets is 4"):
        decode_graph(graphs, 5, 1)
    with pytest.raises(NoBucketError, match=r"exceeds largest bucket.*context of 257 tokens.*max_model_len.* is 256"):
        decode_graph(graphs, 1, 257)
