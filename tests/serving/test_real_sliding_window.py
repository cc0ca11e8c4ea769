"""Models whose layers look back on a sliding window give transformers' tokens beyond it, in the blocks of a window."""

from typing import Any

import pytest

from tests.checkpoints import checkpoint, greedy_oracle
from tests.serving.engine import BACKENDS, generate, metric, prompt, running_llm, statistics

BUCKETS = {"num_batched_tokens_buckets": [128], "num_seqs_buckets": [1, 4], "decode_context_length_buckets": [256]}
ON_DEVICE = {**BUCKETS, "on_device_sampling_config": {"all_greedy": True}}
SIZES: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "block_size": 16,
    "num_gpu_blocks_override": 128,
    "disable_log_stats": False,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("mistral", BUCKETS), ("qwen2-windows", ON_DEVICE)],
    ids=["every layer", "some layers, asynchronous"],
)
def test_real_tokens_past_the_window(backend: str, kind: str, options: dict[str, Any]) -> None:
    path = checkpoint(kind)
    # Within a chunk, over three, and again with all but the last tokens in the prefix cache.
    prompts = [prompt(length, seed=length) for length in (5, 100, 300, 270)]
    repeated = [*prompts[2][:288], 7, 8, 9]
    with running_llm(path, backend, **SIZES, additional_config={"neuron_config": options}) as llm:
        assert generate(llm, prompts, 24) == [greedy_oracle(path, ids, 24) for ids in prompts]
        before = metric(llm, "vllm:prefix_cache_hits")
        assert generate(llm, [repeated], 8) == [greedy_oracle(path, repeated, 8)]
        assert metric(llm, "vllm:prefix_cache_hits") - before == 288
        assert generate(llm, prompts[:1], 4) == [greedy_oracle(path, prompts[0], 4)]
        assert metric(llm, "vllm:kv_cache_usage_perc") == 0
        counters = statistics(llm)
        decoded = {name: rows for name, rows in counters["live_rows"].items() if name.startswith("decode")}
        assert {name.split("_")[2] for name in decoded} == {"ctx256", "ctx1024"}
        # Each token but the first of an answer once, whether or not its step waited for the one before.
        assert sum(decoded.values()) == 4 * 23 + 7 + 3
        assert counters["compiles_after_warmup"] == 0


def test_real_blocks_for_a_window_hold_a_prompt_of_full_length() -> None:
    """1024 tokens are 64 blocks of 16; the window of 12 and a chunk of 128 reach at most 10."""
    path, ids = checkpoint("mistral"), prompt(1000, seed=1)
    sizes = {**SIZES, "num_gpu_blocks_override": 11, "additional_config": {"neuron_config": BUCKETS}}
    with running_llm(path, "neuron_native", **sizes) as llm:
        assert generate(llm, [ids, ids[:400]], 20) == [greedy_oracle(path, p, 20) for p in (ids, ids[:400])]
