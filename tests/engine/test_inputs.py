"""Properties of the input builder for any rows, block tables and buckets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.inputs import InputBuilder, Row
from vllm_neuron.kv_cache.blocks import first_visible
from vllm_neuron.models.model import StepInputs

VOCAB = 1000


Windows = tuple[int | None, ...]


@st.composite
def steps(draw: st.DrawFn) -> tuple[GraphSpec, int, Windows, list[Row]]:
    """A graph, a block size, the groups' windows, and live rows whose requests own disjoint blocks, as the block
    manager guarantees; it has taken back what lies before a window."""
    block_size = draw(st.sampled_from([1, 3, 16, 32]))
    columns = draw(st.integers(1, 6) | st.just(20))
    context = columns * block_size
    windows = tuple(draw(st.lists(st.none() | st.integers(1, 70), min_size=1, max_size=2)))
    if draw(st.booleans()):
        graph = GraphSpec("prefill", draw(st.integers(1, 40)), 1, context)
        live = draw(st.integers(0, 1))
    else:
        batch = draw(st.integers(1, 6))
        graph = GraphSpec("decode", batch, batch, context)
        live = draw(st.integers(0, batch))
    rows = []
    order = np.random.default_rng(draw(st.integers(0, 1000)))
    free = [order.permutation(np.arange(1, 200)).tolist() for _ in windows]
    for _ in range(live):
        most = min(graph.tokens if graph.kind == "prefill" else 1, context)
        count = draw(st.integers(1, most))
        start = draw(st.integers(0, context - count))
        # A request may own blocks beyond the step: for tokens to come, beyond the graph's context even.
        owned = -(-(start + count) // block_size) + draw(st.integers(0, 3))
        block_ids = tuple(np.array([free[g].pop() for _ in range(owned)], dtype=np.int32) for g in range(len(windows)))
        for ids, window in zip(block_ids, windows, strict=True):
            ids[: first_visible(start, window) // block_size] = 0
        token_ids = np.array(draw(st.lists(st.integers(1, VOCAB), min_size=count, max_size=count)), dtype=np.int32)
        rows.append(Row(token_ids, start, block_ids))
    return graph, block_size, windows, rows


@given(step=steps(), dirty=st.booleans())
@settings(max_examples=300, deadline=None)
def test_inputs_of_any_step(step: tuple[GraphSpec, int, Windows, list[Row]], dirty: bool) -> None:
    graph, block_size, windows, rows = step
    groups = len(windows)
    builder = InputBuilder(graph, block_size, windows)
    if dirty:
        for tensor in _tensors(builder.inputs):
            tensor.fill_(987_654)
    inputs = builder.build(rows)

    expected_tokens, expected_positions = [], []
    expected_slots: list[list[int]] = [[] for _ in range(groups)]
    for row in rows:
        for i, token in enumerate(row.token_ids.tolist()):
            position = row.start + i
            expected_tokens.append(token)
            expected_positions.append(position)
            for group in range(groups):
                block = int(row.block_ids[group][position // block_size])
                expected_slots[group].append(block * block_size + position % block_size)
    live, padding = len(expected_tokens), graph.tokens - len(expected_tokens)
    padding_position = expected_positions[-1] if rows and graph.kind == "prefill" else 0
    assert inputs.token_ids.tolist() == expected_tokens + [0] * padding
    assert inputs.positions.tolist() == expected_positions + [padding_position] * padding

    for group in range(groups):
        slots = inputs.slot_mappings[group].tolist()
        assert slots[:live] == expected_slots[group]
        assert min(slots[:live], default=block_size) >= block_size, "a live row may not write to the null block"
        assert all(0 <= slot < block_size for slot in slots[live:]), "padding writes to the null block only"
        table = inputs.block_tables[group].tolist()
        positions = inputs.positions_in_table(group).tolist()
        for request, row in enumerate(rows):
            first = row.start - positions[request] if len(table[0]) * block_size < graph.context else 0
            assert first % block_size == 0
            # Never more than a block before the window: what lies there may be another request's by now.
            assert first_visible(row.start, windows[group]) - block_size < first or first == 0
            assert first <= first_visible(row.start, windows[group])
            begin, end = first // block_size, (row.start + len(row.token_ids) - 1) // block_size + 1
            used = end - begin
            assert table[request][:used] == row.block_ids[group][begin:end].tolist()
            assert set(table[request][used:]) <= {0}
            rows_of = range(len(row.token_ids)) if graph.kind == "prefill" else [request]
            assert [positions[i] for i in rows_of] == [inputs.positions.tolist()[i] - first for i in rows_of]
            assert graph.kind == "decode" or set(positions[live:]) <= {positions[live - 1]}
        assert all(set(row) <= {0} for row in table[len(rows) :])

    rows_with_logits = inputs.logits_rows.tolist()
    last_live = max(live - 1, 0)
    if graph.kind == "prefill":
        assert rows_with_logits == [last_live]
    else:
        assert rows_with_logits == [min(i, last_live) for i in range(graph.requests)]


@given(step=steps())
@settings(max_examples=50, deadline=None)
def test_shapes_strides_and_identity_never_change(step: tuple[GraphSpec, int, Windows, list[Row]]) -> None:
    graph, block_size, windows, rows = step
    builder = InputBuilder(graph, block_size, windows)
    warm_up = [(id(t), t.data_ptr(), t.shape, t.stride(), t.dtype) for t in _tensors(builder.build(()))]
    real = [(id(t), t.data_ptr(), t.shape, t.stride(), t.dtype) for t in _tensors(builder.build(rows))]
    assert warm_up == real
    assert len({entry[0] for entry in real}) == len({entry[1] for entry in real}) == len(real)
    assert {entry[4] for entry in real} == {torch.int32}


def _row(count: int, start: int, blocks: list[int]) -> Row:
    return Row(np.ones(count, dtype=np.int32), start, (np.array(blocks, dtype=np.int32),))


PREFILL = GraphSpec("prefill", 8, 1, 32)
DECODE = GraphSpec("decode", 2, 2, 32)


@pytest.mark.parametrize(
    ("graph", "rows", "message"),
    [
        (PREFILL, [_row(9, 0, [1, 2, 3])], "9 tokens of one request, 8 fit"),
        (PREFILL, [_row(1, 0, [1]), _row(1, 0, [2])], "2 requests in a step of 1"),
        (PREFILL, [_row(0, 0, [1])], "0 tokens"),
        (DECODE, [_row(2, 0, [1])], "2 tokens of one request, 1 fit"),
        (DECODE, [_row(1, 0, [1])] * 3, "3 requests in a step of 2"),
        (DECODE, [_row(1, 32, [1, 2, 3])], "positions 32 to 32 in a context of 32"),
        (DECODE, [_row(1, 16, [1])], "for a request of 17 tokens"),
        (DECODE, [_row(1, 16, [1, 0])], "for a request of 17 tokens"),
        (DECODE, [_row(1, 0, [])], "for a request of 1 tokens"),
        (DECODE, [Row(np.ones(1, dtype=np.int32), 0, ())], "0 block lists for 1 KV groups"),
    ],
)
def test_rows_that_do_not_fit_are_refused(graph: GraphSpec, rows: list[Row], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InputBuilder(graph, 16, (None,)).build(rows)


def test_freed_blocks_behind_a_window_may_be_null() -> None:
    inputs = InputBuilder(DECODE, 16, (None,)).build([_row(1, 20, [0, 7])])
    assert inputs.block_tables[0].tolist() == [[0, 7], [0, 0]]
    assert inputs.slot_mappings[0].tolist() == [7 * 16 + 4, 0]


def test_a_table_with_a_window_begins_where_the_window_does() -> None:
    inputs = InputBuilder(GraphSpec("decode", 2, 2, 512), 16, (None, 20)).build(
        [Row(np.ones(1, dtype=np.int32), 300, (np.arange(1, 20), np.arange(41, 60)))]
    )
    # The window are positions 281 to 300, in blocks 17 and 18; at most it lies in 3 blocks. 128 tokens are 8.
    assert [table.shape for table in inputs.block_tables] == [(2, 32), (2, 8)]
    assert inputs.block_tables[1].tolist() == [[58, 59, *[0] * 6], [0] * 8]
    assert [inputs.positions_in_table(group).tolist() for group in (0, 1)] == [[300, 0], [300 - 17 * 16, 0]]
    assert inputs.slot_mappings[1].tolist() == [59 * 16 + 300 % 16, 0]


def test_a_null_block_inside_a_window_is_refused() -> None:
    blocks = np.arange(1, 20)
    blocks[17] = 0
    with pytest.raises(ValueError, match="KV group 0 has blocks"):
        InputBuilder(GraphSpec("decode", 2, 2, 512), 16, (20,)).build([Row(np.ones(1, dtype=np.int32), 300, (blocks,))])


def _tensors(inputs: StepInputs) -> list[torch.Tensor]:
    trimmed = [positions for positions in inputs.table_positions if isinstance(positions, torch.Tensor)]
    shared = [inputs.token_ids, inputs.positions, inputs.logits_rows]
    return [*shared, *inputs.block_tables, *inputs.slot_mappings, *trimmed]
