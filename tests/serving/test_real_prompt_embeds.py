"""Prompts that are embeddings through vLLM's `LLM`, in float32, on the XLA route.

The same is asked of a server on the native route in tests/server/test_server_prompt_embeds.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import checkpoint, embedding_rows, embeddings_oracle, greedy_oracle, random_embeddings
from tests.serving.engine import metric, prompt, running_llm, statistics

BLOCK, BUCKET = 32, 128
ENGINE: dict[str, Any] = {
    "enable_prompt_embeds": True,
    "disable_log_stats": False,
    "max_num_batched_tokens": BUCKET,
    "additional_config": {"neuron_config": {"num_batched_tokens_buckets": [BUCKET], "num_seqs_buckets": [4]}},
}
Prompt = list[int] | torch.Tensor


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Path, Any]]:
    path = checkpoint("llama")
    with running_llm(path, "vllm_neuron", **ENGINE) as llm:
        yield path, llm
        assert statistics(llm)["compiles_after_warmup"] == 0


def outputs(llm: Any, prompts: Sequence[Prompt], max_tokens: int, **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling)
    inputs = [{"prompt_embeds": p} if isinstance(p, torch.Tensor) else {"prompt_token_ids": p} for p in prompts]
    return llm.generate(inputs, params, use_tqdm=False)


def generate(llm: Any, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs(llm, prompts, max_tokens)]


def expected(path: Path, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    return [
        embeddings_oracle(path, p if isinstance(p, torch.Tensor) else embedding_rows(path, p), max_tokens)
        for p in prompts
    ]


def test_real_rows_of_the_embedding_table_are_the_tokens(served: tuple[Path, Any]) -> None:
    path, llm = served
    for length in (1, BLOCK, BUCKET, BUCKET + 1, 300):
        ids = prompt(length, seed=length)
        assert generate(llm, [embedding_rows(path, ids)], 6) == [greedy_oracle(path, ids, 6)], length


def test_real_both_kinds_in_one_batch(served: tuple[Path, Any]) -> None:
    path, llm = served
    prompts: list[Prompt] = []
    for index, length in enumerate((2, 300, 45, BUCKET, 3)):
        prompts += [random_embeddings(length, seed=index), prompt(length, seed=50 + index)]
    assert generate(llm, prompts, 12) == expected(path, prompts, 12)


def test_real_blocks_are_shared_by_equal_embeddings_only(served: tuple[Path, Any]) -> None:
    path, llm = served
    one, other = random_embeddings(150, seed=20), random_embeddings(150, seed=21)
    longer = torch.cat([one, other[:100]])
    for embeddings, shared in ((one, 0), (one, 128), (other, 0), (longer, 128), (one.double(), 128)):
        before = metric(llm, "vllm:prefix_cache_hits")
        assert generate(llm, [embeddings], 6) == expected(path, [embeddings.float()], 6)
        assert metric(llm, "vllm:prefix_cache_hits") - before == shared


def test_real_preempted_requests_resume(served: tuple[Path, Any]) -> None:
    path, llm = served
    # Four requests of 17 blocks each do not fit 63 blocks at once: some are preempted while they decode.
    prompts = [random_embeddings(445, seed=30), prompt(445, seed=31), random_embeddings(445, seed=32), prompt(445, 33)]
    before = metric(llm, "vllm:num_preemptions")
    assert generate(llm, prompts, 75) == expected(path, prompts, 75)
    assert metric(llm, "vllm:num_preemptions") > before


def test_real_logprobs(served: tuple[Path, Any]) -> None:
    path, llm = served
    ids = prompt(40, seed=3)
    answers = outputs(llm, [ids, embedding_rows(path, ids)], 4, logprobs=2)
    from_ids, from_rows = [
        [{token: entry.logprob for token, entry in step.items()} for step in answer.outputs[0].logprobs]
        for answer in answers
    ]
    assert len(from_ids) == 4
    assert from_rows == [pytest.approx(step, abs=1e-4) for step in from_ids]


@pytest.mark.parametrize(
    ("embeddings", "sampling", "named"),
    [
        (torch.zeros(3, 65), {}, r"\[3, 65\].*hidden size"),
        (torch.full((3, 64), torch.nan), {}, "nan"),
        (torch.zeros(3, 64).int(), {}, "int32"),
        (torch.zeros(0, 64), {}, "empty"),
        (torch.zeros(1024, 64), {}, "max_model_len is 1024"),
        (torch.zeros(3, 64), {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_real_unusable_embeddings_are_refused(
    served: tuple[Path, Any], embeddings: torch.Tensor, sampling: dict[str, Any], named: str
) -> None:
    path, llm = served
    ids = prompt(20, seed=5)
    with pytest.raises(ValueError, match=named):
        outputs(llm, [ids, embeddings], 4, **sampling)
    assert generate(llm, [ids], 4) == [greedy_oracle(path, ids, 4)]
