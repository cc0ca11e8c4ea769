"""Bucket lists and the limits they are tied to."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.config.buckets import powers_of_two

from .builders import NEURON, faults, only_fault, resolved

TOKENS, SEQS = f"{NEURON}.num_batched_tokens_buckets", f"{NEURON}.num_seqs_buckets"
SEGMENTS, CONTEXTS = f"{NEURON}.kv_segment_size_buckets", f"{NEURON}.decode_context_length_buckets"


@pytest.mark.parametrize(
    ("first", "limit", "expected"),
    [
        (128, 1024, (128, 256, 512, 1024)),
        (128, 2000, (128, 256, 512, 1024, 2000)),
        (128, 317, (128, 256, 317)),
        (128, 129, (128, 129)),
        (128, 128, (128,)),
        (128, 64, (64,)),
        (1, 8, (1, 2, 4, 8)),
        (1, 6, (1, 2, 4, 6)),
        (1, 1, (1,)),
    ],
)
def test_powers_of_two(first: int, limit: int, expected: Any) -> None:
    assert powers_of_two(first, limit) == expected


@given(st.integers(1, 1 << 20), st.sampled_from([1, 128]))
def test_automatic_lists_are_ascending_and_end_with_the_limit(limit: int, first: int) -> None:
    values = powers_of_two(first, limit)
    assert values[-1] == limit
    assert all(a < b for a, b in pairwise(values))
    assert all(b <= 2 * a for a, b in pairwise(values)), "padding is less than half"
    assert all(value & (value - 1) == 0 for value in values[:-1])


@given(st.data())
def test_every_size_of_step_has_a_bucket(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 40000))
    tokens = data.draw(st.integers(1, 40000))
    limit = min(length, tokens)
    seqs = data.draw(st.integers(1, limit))
    result = resolved(max_model_len=length, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    assert result.max_num_batched_tokens == limit == result.num_batched_tokens_buckets[-1]
    assert result.max_num_seqs == seqs == result.num_seqs_buckets[-1]
    assert result.decode_context_length_buckets == (length,)
    step = data.draw(st.integers(1, limit))
    bucket = min(b for b in result.num_batched_tokens_buckets if b >= step)
    assert bucket == 128 or bucket < 2 * step or bucket == limit
    batch = data.draw(st.integers(1, seqs))
    assert min(b for b in result.num_seqs_buckets if b >= batch) < 2 * batch


@pytest.mark.parametrize(
    ("neuron", "changes", "option", "words"),
    [
        ({"num_batched_tokens_buckets": [128, 512]}, {}, TOKENS, ["512", "max_model_len=256"]),
        ({"num_batched_tokens_buckets": [128]}, {}, TOKENS, ["max_num_batched_tokens=256", "End the list with 256"]),
        ({"num_batched_tokens_buckets": [128, 256]}, {"max_num_batched_tokens": 8192, "max_model_len": 512}, TOKENS,
         ["max_num_batched_tokens=512", "8192", "max_model_len"]),
        ({"num_batched_tokens_buckets": [128, 512]}, {"max_num_batched_tokens_set": False}, TOKENS,
         ["max_model_len=256", "End the list with 256"]),
        ({"num_seqs_buckets": [1, 8]}, {}, SEQS, ["max_num_seqs=4", "End the list with 4"]),
        ({"num_seqs_buckets": [2]}, {}, SEQS, ["max_num_seqs=4", "set max_num_seqs to 2"]),
        ({"decode_context_length_buckets": [256]}, {}, CONTEXTS, ["less than max_model_len=256"]),
        ({"decode_context_length_buckets": [128, 512]}, {}, CONTEXTS, ["less than max_model_len=256"]),
        ({"kv_segment_size_buckets": [512]}, {}, SEGMENTS, ["max_model_len=256", "Leave it out"]),
        ({"kv_segment_size_buckets": [512]}, {"max_model_len": 128, "block_size": 64}, SEGMENTS,
         ["max_model_len=128", "512 or more"]),
        ({"kv_segment_size_buckets": [512]}, {"max_model_len": 2048, "max_num_batched_tokens": 1024}, SEGMENTS,
         ["max_num_batched_tokens=1024", "set max_num_batched_tokens to 512"]),
        ({"kv_segment_size_buckets": [512], "num_batched_tokens_buckets": [128, 512]},
         {"max_model_len": 2048, "max_num_batched_tokens": 512}, TOKENS, ["kv_segment_size_buckets=[512]"]),
        ({"kv_segment_size_buckets": [512]},
         {"max_model_len": 2048, "max_num_batched_tokens": 512, "block_size": 48}, "block_size", ["divide", "512"]),
        ({}, {"block_size": 0}, "block_size", ["at least 1"]),
        ({}, {"block_size": -32}, "block_size", ["at least 1"]),
        ({}, {"num_gpu_blocks_override": 8}, "num_gpu_blocks_override", ["at least 9", "Set 9 or more"]),
        ({}, {"num_gpu_blocks_override": 0}, "num_gpu_blocks_override", ["at least 9"]),
        # A window of 20 and a step of 32 reach 51 tokens, in up to 3 blocks of 32.
        ({"num_batched_tokens_buckets": [32]},
         {"num_gpu_blocks_override": 3, "kv_windows": (20,), "max_num_batched_tokens": 32},
         "num_gpu_blocks_override", ["at least 4"]),
        ({}, {"max_num_seqs": 300}, "max_num_seqs", ["256 tokens", "Lower max_num_seqs to 256"]),
        ({"num_seqs_buckets": [1, 300]}, {"max_num_seqs_set": False}, SEQS, ["256 tokens"]),
        ({"num_batched_tokens_buckets": [128]}, {"max_num_batched_tokens": 128, "enable_chunked_prefill": False},
         "enable_chunked_prefill", ["128 tokens", "max_model_len=256"]),
    ],
)  # fmt: skip
def test_rules_between_options(neuron: dict[str, Any], changes: dict[str, Any], option: str, words: list[str]) -> None:
    fault = only_fault({"neuron_config": neuron}, **changes)
    assert fault.option == option
    assert not fault.later
    for word in words:
        assert word in str(fault)


@pytest.mark.parametrize(
    ("neuron", "changes"),
    [
        ({"num_batched_tokens_buckets": [128, 256], "num_seqs_buckets": [1, 2, 4]}, {}),
        ({"num_batched_tokens_buckets": [317]}, {"max_num_batched_tokens": 317, "max_model_len": 512}),
        ({"num_batched_tokens_buckets": [128, 317]}, {"max_num_batched_tokens": 317, "max_model_len": 512}),
        ({"num_batched_tokens_buckets": [1, 7, 256]}, {}),
        ({"num_seqs_buckets": [3, 4]}, {}),
        ({"decode_context_length_buckets": [128]}, {}),
        ({"num_batched_tokens_buckets": [128, 256]}, {"max_num_batched_tokens": 256, "max_model_len": 1024}),
        ({"num_batched_tokens_buckets": [256]}, {"max_num_batched_tokens": 8192}),
        ({}, {"enable_chunked_prefill": False}),
        ({}, {"num_gpu_blocks_override": 9}),
        ({}, {"block_size": 256}),
        ({}, {"block_size": 1}),
        ({}, {"max_num_seqs": 256}),
    ],
)
def test_good_lists_are_taken_as_they_are(neuron: dict[str, Any], changes: dict[str, Any]) -> None:
    result = resolved(neuron, **changes)
    for option, values in neuron.items():
        tail = (result.max_model_len,) if option == "decode_context_length_buckets" else ()
        assert getattr(result, option) == (*values, *tail)


@pytest.mark.parametrize("tokens", [317, 2000])
def test_limits_need_not_be_powers_of_two(tokens: int) -> None:
    result = resolved(max_model_len=4096, max_num_batched_tokens=tokens)
    assert result.num_batched_tokens_buckets[-1] == result.max_num_batched_tokens == tokens
    assert result.num_batched_tokens_buckets[0] == 128


@pytest.mark.parametrize(
    ("neuron", "default", "expected"),
    [
        ({"num_batched_tokens_buckets": [256, 512, 1024]}, 8192, 1024),
        ({"num_batched_tokens_buckets": [128, 4096]}, 2048, 4096),
        ({"kv_segment_size_buckets": [2048], "num_batched_tokens_buckets": [2048]}, 8192, 2048),
        ({"kv_segment_size_buckets": [512]}, 8192, 512),
    ],
)
def test_an_open_token_limit_becomes_the_largest_bucket(neuron: dict[str, Any], default: Any, expected: Any) -> None:
    result = resolved(neuron, max_model_len=4096, max_num_batched_tokens=default, max_num_batched_tokens_set=False)
    assert result.max_num_batched_tokens == expected == result.num_batched_tokens_buckets[-1]
    (notice,) = result.notices
    assert f"from {default} to {expected}" in notice.text and "max_num_batched_tokens" in notice.text


def test_an_open_batch_limit_becomes_the_largest_batch_bucket() -> None:
    result = resolved({"num_seqs_buckets": [1, 2, 4, 8]}, max_num_seqs=256, max_num_seqs_set=False)
    assert result.max_num_seqs == 8
    (notice,) = result.notices
    assert "max_num_seqs" in notice.text and "from 256 to 8" in notice.text


def test_an_open_batch_limit_is_lowered_to_the_tokens_of_a_step() -> None:
    result = resolved(max_model_len=64, max_num_batched_tokens=8192, max_num_seqs=256, max_num_seqs_set=False)
    assert result.max_num_seqs == result.max_num_batched_tokens == 64
    assert result.num_batched_tokens_buckets == (64,) and result.num_seqs_buckets[-1] == 64
    (notice,) = result.notices
    assert "max_num_seqs" in notice.text


def test_a_segment_is_one_prefill_step() -> None:
    result = resolved({"kv_segment_size_buckets": [512]}, max_model_len=2048, max_num_batched_tokens=512)
    assert result.kv_segment_size == 512
    assert result.num_batched_tokens_buckets == (512,)
    assert resolved({"kv_segment_size_buckets": None}).kv_segment_size is None


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("segment", [None, [512]])
def test_prefix_caching_needs_no_segments(prefix_caching: bool, segment: list[int] | None) -> None:
    neuron = {"kv_segment_size_buckets": segment}
    result = resolved(neuron, max_model_len=512, max_num_batched_tokens=512, enable_prefix_caching=prefix_caching)
    assert result.enable_prefix_caching is prefix_caching


def test_the_block_size_is_32_unless_set() -> None:
    assert resolved(block_size=None).block_size == 32
    assert resolved(block_size=128).block_size == 128


def test_a_list_with_a_fault_of_its_own_is_reported_once() -> None:
    """What would follow from the unusable list, such as limits that do not match it, is not reported on top."""
    for option in ("num_batched_tokens_buckets", "num_seqs_buckets"):
        fault = only_fault({"neuron_config": {option: [256, 128]}}, max_num_seqs=300)
        assert "ascending" in fault.rule


@pytest.mark.parametrize("option", ["num_batched_tokens_buckets", "num_seqs_buckets"])
def test_a_list_that_does_not_match_its_limit_is_reported_once(option: str) -> None:
    assert "must equal" in only_fault({"neuron_config": {option: [128, 200]}}, max_num_seqs=300).rule


def test_only_a_limit_that_is_cut_is_explained() -> None:
    neuron = {"num_batched_tokens_buckets": [128]}
    assert "limited by" not in only_fault({"neuron_config": neuron}).rule
    assert "limited by" in only_fault({"neuron_config": neuron}, max_num_batched_tokens=257).rule


def test_all_faults_come_together() -> None:
    found = faults(
        {
            "neuron_config": {
                "num_batched_tokens_buckets": ["256"],
                "num_seqs_buckets": [2],
                "decode_context_length_buckets": [128, 128],
                "kv_segment_size_buckets": [300],
                "typo": 1,
            }
        },
        {"VLLM_NEURON_CPU_MODE": "maybe"},
        num_gpu_blocks_override=1,
        scheduling_policy="priority",
    )
    assert len(found) == 8
