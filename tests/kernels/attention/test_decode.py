"""The decode attention kernel against its twin."""

from dataclasses import replace

import nki
import pytest
import torch
from hypothesis import given, settings

from tests.kernels.attention.cases import Case, check_close, decode_cases
from vllm_neuron.kernels.decode_mask_torch import decode_mask
from vllm_neuron.kernels.paged_attention_torch import paged_attention
from vllm_neuron.kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_kernel

SMALL = Case(2, 1, 2, 4, 64, 16, 256, None, torch.float32, 1)


@given(case=decode_cases())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_equals_the_twin(case):
    arguments = case.arguments()
    check_close(paged_decode_attention(*arguments, lnc=case.lnc), paged_attention(*arguments))


@given(case=decode_cases())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_a_mask_says_what_positions_say(case):
    arguments = case.arguments()
    mask = decode_mask(arguments[4], case.context, case.window)
    check_close(paged_decode_attention(*arguments, mask, lnc=case.lnc), paged_attention(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_goes_on_over_several_tiles(dtype):
    """Scores that grow with the position, so that each tile raises the maximum, or shrink, so that the first has it.

    The twin gets float32: in bfloat16 it rounds scores before the softmax, which shows where they are large.
    """
    case = Case(1, 1, 8, 4, 128, 32, 2048, None, dtype, 1)
    for slope in (0.002, -0.002):
        q, k_cache, v_cache, table, positions, scale, window, _ = case.arguments(torch.tensor([2047]))
        q, k_cache = q.abs(), k_cache.clone()
        order = slope * torch.arange(2048)
        k_cache[table[0]] = k_cache[table[0]] * 0.1 + order.view(-1, 32, 1, 1).to(dtype)
        rest = table, positions, scale, window
        expected = paged_attention(q.float(), k_cache.float(), v_cache.float(), *rest).to(dtype)
        check_close(paged_decode_attention(q, k_cache, v_cache, *rest), expected)


def test_a_request_with_nan_does_not_reach_another():
    case = replace(SMALL, requests=8, context=512)
    arguments = case.arguments(torch.full((8,), 300))
    expected = paged_attention(*arguments)
    _, k_cache, v_cache, table, *_ = arguments
    for cache in (k_cache, v_cache):
        cache[table[3].long()] = torch.nan
    got = paged_decode_attention(*arguments)
    assert got[3].isnan().all()
    check_close(got[torch.arange(8) != 3], expected[torch.arange(8) != 3])


def test_rows_that_nobody_sees_are_not_loaded():
    """Their entries of the block table may be anything."""
    *arguments, table, positions, scale, window, _ = replace(SMALL, window=20).arguments(torch.tensor([100, 130]))
    expected = paged_attention(*arguments, table, positions, scale, window)
    column = torch.arange(table.shape[1])
    unused = (column * 16 > positions[:, None]) | (column * 16 + 15 <= positions[:, None] - 20)
    table[unused] = 10**6
    check_close(paged_decode_attention(*arguments, table, positions, scale, window), expected)


def test_strict_mode_has_nothing_to_note():
    assert not nki.simulate(paged_decode_attention_kernel[2]).run(*SMALL.arguments()).notes


REFUSED = {
    "q must be float32 or bfloat16, not float16": lambda a: a | {"q": a["q"].half()},
    "q must have shape [T, N, D], not (2, 512)": lambda a: a | {"q": a["q"].flatten(1)},
    "block_table must be int32, not int64": lambda a: a | {"block_table": a["block_table"].long()},
    "positions must be int32, not int64": lambda a: a | {"positions": a["positions"].long()},
    "v_cache must have shape [33, 16, 2, 64], not (33, 16, 1, 64)": lambda a: a | {"v_cache": a["v_cache"][:, :, :1]},
    "k_cache must have shape [NB, BS, K, 32], not (33, 16, 2, 64)": lambda a: a | {"q": a["q"][..., :32]},
    "q must have a multiple of the 2 heads of k_cache, not 7": lambda a: a | {"q": a["q"][:, :7]},
    "q must have as many rows for each of 2 requests, not 1 rows": lambda a: (
        a | {"q": a["q"][:1], "positions": a["positions"][:1]}
    ),
    "positions must have shape [2], not (1,)": lambda a: a | {"positions": a["positions"][:1]},
    "k_cache must have blocks of a power of two slots, not 12": lambda a: (
        a | {"k_cache": a["k_cache"][:, :12], "v_cache": a["v_cache"][:, :12]}
    ),
    "block_table must cover a multiple of 128 positions, not 240": lambda a: (
        a | {"block_table": a["block_table"][:, :15]}
    ),
    "k_cache must have up to 16777216 slots, not 33554432": lambda a: (
        a | {name: torch.zeros(1).expand(2**21, 16, 2, 64) for name in ("k_cache", "v_cache")}
    ),
    "window must be 1 or more, or None, not 0": lambda a: a | {"window": 0},
    "scale must be more than 0, not 0.0": lambda a: a | {"scale": 0.0},
    "sinks must have shape [8], not (2,)": lambda a: a | {"sinks": torch.zeros(2)},
    "sinks must be float32, not bfloat16": lambda a: a | {"sinks": torch.zeros(8).bfloat16()},
    "mask must have shape [2, 256], not (2, 255)": lambda a: a | {"mask": torch.zeros(2, 255).byte()},
    "mask must be uint8, not bool": lambda a: a | {"mask": torch.zeros(2, 256).bool()},
    "lnc must be 1 or 2, not 3": lambda a: a | {"lnc": 3},
    "q must have up to 128 rows times heads per request and core, not 256": lambda a: (
        a | {"q": torch.zeros(64, 8, 64), "positions": torch.zeros(64).int()}
    ),
    "k_cache must have up to 32768 bytes in 1 slots of a core, not 65536": lambda a: (
        a
        | {"q": torch.zeros(2, 128, 128)}
        | {name: torch.zeros(1).expand(33, 16, 128, 128) for name in ("k_cache", "v_cache")}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(message):
    names = ("q", "k_cache", "v_cache", "block_table", "positions", "scale", "window", "sinks")
    arguments = dict(zip(names, SMALL.arguments(), strict=True))
    with pytest.raises(ValueError) as raised:
        paged_decode_attention(**REFUSED[message](arguments))
    assert message in str(raised.value)
