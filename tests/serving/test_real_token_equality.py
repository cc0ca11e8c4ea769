"""Greedy tokens equal transformers' in float32, for each architecture and route, however requests are scheduled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import checkpoint, greedy_oracle
from tests.serving.engine import BACKENDS, generate, metric, prompt, running_llm, statistics


@pytest.fixture(scope="module", params=[(a, b) for a in ("llama", "qwen2", "qwen3") for b in BACKENDS], ids="-".join)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any]]:
    architecture, backend = request.param
    path = checkpoint(architecture)
    with running_llm(path, backend, disable_log_stats=False) as llm:
        yield path, llm


def expected(path: Path, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
    counts = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
    return [greedy_oracle(path, p, n) for p, n in zip(prompts, counts, strict=True)]


def test_real_prompts_at_bucket_edges(served: tuple[Path, Any]) -> None:
    path, llm = served
    for length in (1, 127, 128, 129, 255, 256):
        prompts = [prompt(length, seed=length)]
        assert generate(llm, prompts, 8) == expected(path, prompts, 8), length


def test_real_prompt_split_over_steps(served: tuple[Path, Any]) -> None:
    path, llm = served
    for length in (257, 512, 600):
        prompts = [prompt(length, seed=length)]
        assert generate(llm, prompts, 8) == expected(path, prompts, 8), length


def test_real_full_batch(served: tuple[Path, Any]) -> None:
    path, llm = served
    prompts = [prompt(length, seed=length) for length in (5, 40, 70, 130)]
    assert generate(llm, prompts, 32) == expected(path, prompts, 32)


def test_real_requests_join_and_leave(served: tuple[Path, Any]) -> None:
    path, llm = served
    prompts = [prompt(3 + 17 * i, seed=100 + i) for i in range(10)]
    counts = [1 + (7 * i) % 23 for i in range(10)]
    assert generate(llm, prompts, counts) == expected(path, prompts, counts)


def test_real_preempted_requests_resume(served: tuple[Path, Any]) -> None:
    path, llm = served
    # Four requests of 17 blocks each do not fit 63 blocks at once: some are preempted while they decode.
    prompts = [prompt(445, seed=200 + i) for i in range(4)]
    before = metric(llm, "vllm:num_preemptions")
    assert generate(llm, prompts, 75) == expected(path, prompts, 75)
    assert metric(llm, "vllm:num_preemptions") > before


def test_real_prefix_hit_of_every_remainder(served: tuple[Path, Any]) -> None:
    path, llm = served
    block = 32
    generate(llm, [prompt(3 * block, seed=300)], 1)
    for length in range(2 * block, 3 * block + 3):
        before = metric(llm, "vllm:prefix_cache_hits")
        prompts = [prompt(length, seed=300)]
        assert generate(llm, prompts, 4) == expected(path, prompts, 4), length
        # The last token is always computed, so a prompt that ends on a block edge hits one block less.
        assert metric(llm, "vllm:prefix_cache_hits") - before == (length - 1) // block * block


def test_real_nothing_compiles_after_warmup(served: tuple[Path, Any]) -> None:
    _, llm = served
    counters = statistics(llm)
    assert counters["compiled"] + counters["cached"] == len(counters["seconds"])
    assert counters["compiles_after_warmup"] == 0
