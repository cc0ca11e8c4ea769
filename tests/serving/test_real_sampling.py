"""Host sampling is vLLM's own: every parameter acts, and distributions match the model's."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from tests.checkpoints import checkpoint, greedy_oracle, logits_oracle
from tests.serving.engine import BACKENDS, generate, prompt, running_llm

PROMPT = prompt(20, seed=7)
BUCKETS = {"neuron_config": {"num_batched_tokens_buckets": [256], "num_seqs_buckets": [8]}}
SAMPLES = 250


@pytest.fixture(scope="module", params=BACKENDS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any]]:
    path = checkpoint("llama")
    with running_llm(path, request.param, max_num_seqs=8, additional_config=BUCKETS) as llm:
        yield path, llm


def next_token_logits(path: Path) -> torch.Tensor:
    return logits_oracle(path, PROMPT)[-1].double()


def sample(llm: Any, count: int = SAMPLES, **sampling: Any) -> list[int]:
    return [ids[0] for ids in generate(llm, [PROMPT] * count, 1, **sampling)]


@pytest.mark.parametrize("top_k", [None, -1, 0])
def test_real_unlimited_top_k_follows_the_distribution(served: tuple[Path, Any], top_k: int | None) -> None:
    path, llm = served
    limits = {} if top_k is None else {"top_k": top_k}
    counts = Counter(sample(llm, temperature=1.0, top_p=1.0, **limits))
    probabilities = torch.softmax(next_token_logits(path), dim=-1)
    # Bins of about equal mass, so that the test's approximation holds for a long-tailed vocabulary.
    order = probabilities.argsort(descending=True)
    edges = (probabilities[order].cumsum(0) * 10).floor().clamp(max=9)
    mass = torch.zeros(10, dtype=torch.double).index_add(0, edges.long(), probabilities[order])
    seen = torch.zeros(10, dtype=torch.double)
    for bin_index, token in zip(edges.long().tolist(), order.tolist(), strict=True):
        seen[bin_index] += counts[token]
    keep = mass > 0
    assert chisquare(seen[keep].numpy(), (mass[keep] / mass[keep].sum() * SAMPLES).numpy()).pvalue > 0.001
    assert len(counts) > 5


def test_real_small_top_k(served: tuple[Path, Any]) -> None:
    path, llm = served
    best = next_token_logits(path).topk(5).indices.tolist()
    assert set(sample(llm, count=50, temperature=1.0, top_k=1)) == {best[0]}
    drawn = set(sample(llm, count=200, temperature=1.0, top_k=5))
    assert drawn <= set(best) and len(drawn) > 1


def test_real_greedy_rows_beside_random_rows(served: tuple[Path, Any]) -> None:
    from vllm import SamplingParams

    path, llm = served
    params = [SamplingParams(temperature=i % 2 * 1.5, max_tokens=8, ignore_eos=True) for i in range(8)]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 8, params, use_tqdm=False)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    assert all(ids == greedy_oracle(path, PROMPT, 8) for ids in tokens[::2])
    assert any(ids != greedy_oracle(path, PROMPT, 8) for ids in tokens[1::2])


def test_real_seed_repeats_and_batch_does_not_matter(served: tuple[Path, Any]) -> None:
    _, llm = served
    alone = generate(llm, [PROMPT], 12, temperature=1.0, seed=5)
    together = generate(llm, [PROMPT, prompt(40, seed=8), PROMPT], 12, temperature=1.0, seed=5)
    assert together[0] == together[2] == alone[0]
    assert generate(llm, [PROMPT], 12, temperature=1.0, seed=6) != alone


def test_real_min_p_keeps_only_likely_tokens(served: tuple[Path, Any]) -> None:
    path, llm = served
    probabilities = torch.softmax(next_token_logits(path), dim=-1)
    likely = set((probabilities >= 0.5 * probabilities.max()).nonzero().flatten().tolist())
    assert set(sample(llm, count=100, temperature=1.0, min_p=0.5)) <= likely


def test_real_biases_and_bans(served: tuple[Path, Any]) -> None:
    path, llm = served
    first, second = next_token_logits(path).topk(2).indices.tolist()
    assert sample(llm, count=1, logit_bias={first: -100.0}) == [second]
    assert sample(llm, count=1, allowed_token_ids=[7]) == [7]


def test_real_bad_words_are_not_said(served: tuple[Path, Any]) -> None:
    path, llm = served
    tokenizer = llm.get_tokenizer()
    for seed in range(100):
        ids = prompt(20, seed=seed)
        first, second = logits_oracle(path, ids)[-1].topk(2).indices.tolist()
        word = tokenizer.decode([first])
        if word.strip() and tokenizer.encode(word, add_special_tokens=False) == [first]:
            assert generate(llm, [ids], 1, bad_words=[word]) == [[second]]
            return
    pytest.fail("no prompt's first token is a word of its own")


def test_real_repetition_penalty_equals_the_formula(served: tuple[Path, Any]) -> None:
    path, llm = served
    logits = next_token_logits(path)
    seen = torch.tensor(sorted(set(PROMPT)))
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1000.0, logits[seen] * 1000.0)
    assert sample(llm, count=1, repetition_penalty=1000.0) == [int(logits.argmax())]


def test_real_frequency_and_presence_penalties_forbid_repeats(served: tuple[Path, Any]) -> None:
    _, llm = served
    plain, penalised = (generate(llm, [PROMPT], 24, presence_penalty=p)[0] for p in (0.0, 2.0))
    assert len(set(penalised)) >= len(set(plain))
    assert generate(llm, [PROMPT], 24, frequency_penalty=2.0)[0] != plain or len(set(plain)) == len(plain)


def test_real_min_tokens_delays_the_stop(served: tuple[Path, Any]) -> None:
    path, llm = served
    first = greedy_oracle(path, PROMPT, 1)[0]
    assert generate(llm, [PROMPT], 10, stop_token_ids=[first], ignore_eos=False) == [[first]]
    delayed = generate(llm, [PROMPT], 10, stop_token_ids=[first], ignore_eos=False, min_tokens=5)[0]
    assert len(delayed) >= 5 and first not in delayed[:5]


def test_real_logprobs_equal_the_oracle(served: tuple[Path, Any]) -> None:
    from vllm import SamplingParams

    path, llm = served
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    # Longer than one step, so prompt logprobs come in several pieces.
    ids = prompt(300, seed=9)
    output = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    tokens = list(output.outputs[0].token_ids)
    oracle = torch.log_softmax(logits_oracle(path, [*ids, *tokens]).double(), dim=-1)
    assert len(output.prompt_logprobs) == len(ids) and output.prompt_logprobs[0] is None
    for position in range(1, len(ids)):
        entry = output.prompt_logprobs[position]
        assert ids[position] in entry and len(entry) in (2, 3)
        for token, found in entry.items():
            assert found.logprob == pytest.approx(float(oracle[position - 1, token]), abs=1e-3)
    for step, entry in enumerate(output.outputs[0].logprobs):
        best = oracle[len(ids) - 1 + step].topk(3).indices.tolist()
        assert list(entry)[:3] == best and tokens[step] == best[0]
        for token in best:
            assert entry[token].logprob == pytest.approx(float(oracle[len(ids) - 1 + step, token]), abs=1e-3)


def test_real_several_completions_of_one_prompt(served: tuple[Path, Any]) -> None:
    from vllm import SamplingParams

    _, llm = served
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs
    assert len({tuple(o.token_ids) for o in outputs}) > 1


def test_real_structured_outputs_obey(served: tuple[Path, Any]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    _, llm = served
    constrained = SamplingParams(
        temperature=1.0, seed=1, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}")
    )
    plain = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt(15, seed=s)} for s in range(4)]
    outputs = llm.generate(prompts, [constrained, plain, constrained, plain], use_tqdm=False)
    for output in outputs[::2]:
        text = output.outputs[0].text
        assert len(text) == 3 and text.isdigit()
    assert all(len(o.outputs[0].token_ids) == 8 for o in outputs[1::2])
