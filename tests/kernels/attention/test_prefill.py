"""The prefill attention kernel against its twin."""

from dataclasses import replace

import nki
import pytest
import torch
from hypothesis import given, settings

from tests.kernels.attention.cases import Case, check_close, prefill_cases
from vllm_neuron.kernels.paged_attention_torch import paged_attention
from vllm_neuron.kernels.paged_prefill_attention import paged_prefill_attention, paged_prefill_attention_kernel

SMALL = Case(1, 200, 2, 2, 64, 16, 256, None, torch.float32, 1)


@given(case=prefill_cases())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_equals_the_twin(case):
    arguments = case.arguments()
    check_close(paged_prefill_attention(*arguments, lnc=case.lnc), paged_attention(*arguments))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_give_what_a_whole_prefill_gives(dtype, window):
    """1280 tokens in segments of 512, the last of them short."""
    case = Case(1, 1280, 1, 2, 64, 32, 1280, window, dtype, 1)
    q, k_cache, v_cache, table, positions, *rest = case.arguments(torch.tensor([0]))
    expected = paged_attention(q.float(), k_cache.float(), v_cache.float(), table, positions, *rest).to(dtype)
    for start in range(0, 1280, 512):
        rows = slice(start, start + 512)
        got = paged_prefill_attention(q[rows], k_cache, v_cache, table, positions[rows], *rest)
        check_close(got, expected[rows])


@pytest.mark.parametrize("slope", [0.002, -0.002])
def test_softmax_goes_on_over_several_steps(slope):
    """Scores that grow with the position, so that each step raises the maximum, or shrink, so that the first has it."""
    case = Case(1, 40, 1, 2, 128, 32, 2048, None, torch.float32, 1)
    q, k_cache, v_cache, table, *rest = case.arguments(torch.tensor([2000]))
    k_cache[table[0]] = k_cache[table[0]] * 0.1 + slope * torch.arange(2048).view(-1, 32, 1, 1)
    arguments = (q.abs(), k_cache.nan_to_num(), v_cache, table, *rest)
    check_close(paged_prefill_attention(*arguments), paged_attention(*arguments))


def test_many_heads_take_several_blocks_of_rows():
    arguments = Case(1, 300, 8, 8, 128, 32, 384, None, torch.bfloat16, 1).arguments()
    check_close(paged_prefill_attention(*arguments), paged_attention(*arguments))


def test_rows_that_nobody_sees_are_not_loaded():
    """Their entries of the block table may be anything."""
    *arguments, table, positions, scale, window, _ = replace(SMALL, rows=30, window=20).arguments(torch.tensor([100]))
    expected = paged_attention(*arguments, table, positions, scale, window)
    column = torch.arange(table.shape[1])
    table[0, (column * 16 > 129) | (column * 16 + 15 <= 100 - 20)] = 10**6
    check_close(paged_prefill_attention(*arguments, table, positions, scale, window), expected)


def test_strict_mode_has_nothing_to_note():
    assert not nki.simulate(paged_prefill_attention_kernel[2]).run(*SMALL.arguments()).notes


REFUSED = {
    "v_cache must have shape [17, 16, 2, 64], not (17, 16, 1, 64)": lambda a: a | {"v_cache": a["v_cache"][:, :, :1]},
    "block_table must cover a multiple of 128 positions, not 240": lambda a: (
        a | {"block_table": a["block_table"][:, :15]}
    ),
    "k_cache must have blocks of up to 128 slots, not 256": lambda a: (
        a
        | {name: torch.zeros(1).expand(2, 256, 2, 64) for name in ("k_cache", "v_cache")}
        | {"block_table": torch.zeros(1, 1).int()}
    ),
    "q must have heads of up to 98304 bytes per partition of a core, not 196608 of 256 heads of 64": lambda a: (
        a | {"q": torch.zeros(200, 256, 64)}
    ),
    "k_cache must have slots of up to 16384 bytes on a core, not 18432": lambda a: (
        a
        | {"q": torch.zeros(1).expand(200, 36, 128)}
        | {name: torch.zeros(1).expand(17, 16, 36, 128) for name in ("k_cache", "v_cache")}
    ),
    "sinks must have shape [4], not (2,)": lambda a: a | {"sinks": torch.zeros(2)},
    "lnc must be 1 or 2, not 0": lambda a: a | {"lnc": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message):
    names = ("q", "k_cache", "v_cache", "block_table", "positions", "scale", "window", "sinks")
    arguments = dict(zip(names, SMALL.arguments(), strict=True))
    with pytest.raises(ValueError) as raised:
        paged_prefill_attention(**REFUSED[message](arguments))
    assert message in str(raised.value)
