"""Which layers share blocks, and how many blocks a request holds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.config.blocks import request_blocks
from vllm_neuron.kv_cache.blocks import first_visible, table_blocks
from vllm_neuron.kv_cache.layout import (
    KVLayerSpec,
    block_bytes,
    group_windows,
    layer_shapes,
    pool_indexes,
    with_groups,
)


def layers(*windows: int | None) -> tuple[KVLayerSpec, ...]:
    return with_groups(KVLayerSpec(2, 8, window) for window in windows)


@pytest.mark.parametrize(
    ("windows", "groups", "pools"),
    [
        ((None,) * 3, [0, 0, 0], [0, 1, 2]),
        ((4,) * 3, [0, 0, 0], [0, 1, 2]),
        ((None, 4, None, 4), [0, 1, 0, 1], [0, 0, 1, 1]),
        # Five in turn to one: five groups of a layer each, or of two.
        ((4, 4, 4, None), [0, 1, 2, 3], [0, 0, 0, 0]),
        ((4, 4, None, 4, 4, None), [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]),
        # One more of a kind than of the other leaves a place empty rather than making two groups.
        ((None, 4) * 5 + (None,), [0, 1] * 5 + [0], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]),
    ],
)
def test_groups_and_pools(windows: tuple[int | None, ...], groups: list[int], pools: list[int]) -> None:
    found = layers(*windows)
    assert [layer.group for layer in found] == groups
    assert list(pool_indexes(found)) == pools
    assert all(group_windows(found)[layer.group] == layer.window for layer in found)


def test_groups_share_the_bytes_of_a_block() -> None:
    mixed, alike = layers(None, 4, None, 4), layers(None, None)
    assert layer_shapes(mixed, 9, 16) == layer_shapes(alike, 9, 16) == ((9, 16, 2, 8),) * 2
    assert block_bytes(mixed, 16, torch.float32) == block_bytes(alike, 16, torch.float32)


def test_layers_of_a_group_look_equally_far_back_and_those_of_a_pool_have_the_same_heads() -> None:
    with pytest.raises(ValueError, match="one sliding window"):
        group_windows((KVLayerSpec(2, 8), KVLayerSpec(2, 8, 4)))
    with pytest.raises(ValueError, match="KV heads of one kind"):
        layer_shapes((KVLayerSpec(2, 8), KVLayerSpec(4, 8, 4, group=1)), 9, 16)


@given(
    start=st.integers(0, 500),
    rows=st.integers(1, 70),
    window=st.integers(1, 200),
    block_size=st.sampled_from([1, 3, 32]),
)
def test_a_trimmed_table_holds_what_any_row_of_a_step_sees(start: int, rows: int, window: int, block_size: int) -> None:
    columns = table_blocks(rows, 600, window, block_size)
    first = first_visible(start, window) // block_size
    assert (start + rows - 1) // block_size - first < columns <= table_blocks(rows, 600, None, block_size)


def test_blocks_of_a_request() -> None:
    # 100 tokens are 7 blocks of 16; a window of 20 and a step of 32 reach 51 tokens, in up to 5 blocks.
    assert request_blocks((None,), 100, 32, 16) == 7
    assert request_blocks((20,), 100, 32, 16) == 5
    assert request_blocks((20,), 40, 32, 16) == 3
    assert request_blocks((None, 20), 100, 32, 16) == 12
