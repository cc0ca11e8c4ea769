"""Prefix caching gives the tokens that no caching gives, for every batch size, segment and block edge."""

import pytest

from tests.checkpoints import checkpoint, greedy_oracle
from tests.serving.engine import BACKENDS, generate, metric, prompt, running_llm

SEGMENTED = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 160,
    "disable_log_stats": False,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_real_segmented_prefill_with_hits(backend: str, max_num_seqs: int) -> None:
    path = checkpoint("llama")
    long = prompt(600, seed=1)
    repeats = [long, long, [*long, *prompt(30, seed=2)], long[:576], long[:577]]
    # Prompts that share 32, 480, 512 and 544 tokens with one that is already cached.
    base = prompt(544, seed=3)
    shared = [base[:k] + prompt(n - k, seed=k) for k, n in ((32, 545), (480, 1024), (512, 1025), (544, 1600))]
    buckets = {"num_batched_tokens_buckets": [512], "num_seqs_buckets": [max_num_seqs]}
    config = {"neuron_config": {"kv_segment_size_buckets": [512], **buckets}}
    with running_llm(path, backend, max_num_seqs=max_num_seqs, additional_config=config, **SEGMENTED) as llm:
        for ids in repeats:
            assert generate(llm, [ids], 6) == [greedy_oracle(path, ids, 6)]
        assert metric(llm, "vllm:prefix_cache_hits") >= 3 * 544
        generate(llm, [base], 1)
        assert generate(llm, shared, 6) == [greedy_oracle(path, ids, 6) for ids in shared]
        for ids in reversed(shared):
            assert generate(llm, [ids], 6) == [greedy_oracle(path, ids, 6)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_block_as_large_as_half_the_context(backend: str) -> None:
    path = checkpoint("llama")
    ids = prompt(100, seed=4)
    small = {
        "max_model_len": 128,
        "max_num_batched_tokens": 128,
        "block_size": 64,
        "disable_log_stats": False,
        "additional_config": {"neuron_config": {"num_seqs_buckets": [4]}},
    }
    with running_llm(path, backend, **small) as llm:
        for _ in range(2):
            assert generate(llm, [ids], 6) == [greedy_oracle(path, ids, 6)]
        assert metric(llm, "vllm:prefix_cache_hits") == 64
