"""From vLLM's requests to the inputs of the sampler: whose numbers, whose masks, and what comes back."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tests.checkpoints import VOCAB_SIZE, tokenizer
from tests.plugin.simulation import Simulation, answer, embedded, make_config, prompts, scores
from vllm_neuron.plugin.device_sampling import _masks, request_number

ON_DEVICE = {"neuron_config": {"on_device_sampling_config": {}}}
NAMES = [f"request-{i}" for i in range(9)]
PROMPTS = dict(zip(NAMES, prompts([3, 20, 9, 30, 5, 12, 7, 25, 4]), strict=True))


def simulation(num_blocks: int = 64, **args: Any) -> Simulation:
    return Simulation(make_config(additional_config=ON_DEVICE, **args), num_blocks)


def constraint(**constraints: Any) -> StructuredOutputsParams:
    """As vLLM's front end hands it on."""
    params = StructuredOutputsParams(**constraints)
    params._backend = "guidance" if "json" in constraints else "xgrammar"
    return params


def run(names: list[str], num_blocks: int = 64, before: Callable[[Simulation], None] | None = None) -> dict[str, Any]:
    """Tokens of these requests, every other one greedy."""
    running = simulation(num_blocks)
    for name in names:
        index = NAMES.index(name)
        running.add(name, PROMPTS[name], 10 + index, temperature=1.3 * (index % 2), top_k=40)
    if before is not None:
        before(running)
    running.run()
    return running.tokens


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    return {name: run([name])[name] for name in NAMES}


def test_greedy_rows_equal_the_oracle_and_random_ones_do_not(alone: dict[str, list[int]]) -> None:
    for index, (name, tokens) in enumerate(alone.items()):
        assert (tokens == answer(PROMPTS[name], 10 + index)) == (index % 2 == 0)


def test_tokens_do_not_depend_on_the_batch_or_on_the_order(alone: dict[str, list[int]]) -> None:
    assert run(NAMES) == alone
    assert run(NAMES[::-1]) == alone


def test_tokens_do_not_depend_on_requests_that_are_given_up(alone: dict[str, list[int]]) -> None:
    def leave(running: Simulation) -> None:
        running.add("gone", PROMPTS[NAMES[1]], 30, temperature=1.0)
        running.step()
        running.abort(NAMES[0])
        running.step()
        running.abort("gone")

    found = run(NAMES, before=leave)
    assert {name: found[name] for name in NAMES[1:]} == {name: alone[name] for name in NAMES[1:]}


@pytest.mark.parametrize("runner", ["0", "1"])
def test_tokens_survive_preemption(alone: dict[str, list[int]], runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    running = simulation(12)
    for name in NAMES[:5]:
        index = NAMES.index(name)
        running.add(name, PROMPTS[name], 10 + index, temperature=1.3 * (index % 2), top_k=40)
    running.run()
    assert running.trace.preemptions
    assert running.tokens == {name: alone[name] for name in NAMES[:5]}


def test_another_seed_gives_other_tokens(alone: dict[str, list[int]]) -> None:
    running = simulation(seed=1)
    running.add(NAMES[1], PROMPTS[NAMES[1]], 11, temperature=1.3, top_k=40)
    running.run()
    assert running.tokens[NAMES[1]] != alone[NAMES[1]]


@pytest.mark.parametrize("top_k", [None, -1, 0, 1, 5])
def test_unset_top_k_is_no_limit_and_temperature_counts(top_k: int | None) -> None:
    """Case SMP-1: 200 requests for one token after the same prompt, at temperature 1."""
    running, prompt = simulation(), PROMPTS[NAMES[0]]
    for index in range(200):
        running.add(f"request {index}", prompt, 1, temperature=1.0, **({} if top_k is None else {"top_k": top_k}))
    running.run()
    drawn = torch.tensor([tokens[0] for tokens in running.tokens.values()])
    order = torch.from_numpy(scores(prompt)).argsort(descending=True)
    if top_k in (1, 5):
        assert set(drawn.tolist()) <= set(order[:top_k].tolist()) and len(set(drawn.tolist())) == top_k
        return
    # Ten bins of about equal mass: few samples of many tokens. The sampler's candidates are the 256 most likely.
    mass = torch.softmax(torch.from_numpy(scores(prompt))[order[:256]].double(), 0)
    bins = (mass.cumsum(0) * 10).floor().clamp(max=9).long()
    place = {int(token): int(bins[rank]) for rank, token in enumerate(order[:256])}
    seen = torch.bincount(torch.tensor([place[token] for token in drawn.tolist()]), minlength=10)
    expected = torch.zeros(10, dtype=torch.double).index_add(0, bins, mass) * len(drawn)
    assert chisquare(seen.numpy(), expected.numpy()).pvalue > 0.001


def test_every_position_has_its_own_number() -> None:
    running = simulation()
    running.add("a", PROMPTS[NAMES[3]], 20, temperature=1.0)
    running.run()
    # Its prompt takes two steps, and the first of them wants no token.
    uniforms = [row.uniform for row in running.executor.sampled]
    assert len(uniforms) == 21 and uniforms[0] == 0 and len(set(uniforms)) == 21


def test_requests_are_known_by_the_name_their_client_knows() -> None:
    assert (
        request_number("cmpl-abc-0-1234abcd") == request_number("cmpl-abc-0-dcba4321") == request_number("cmpl-abc-0")
    )
    assert len({request_number(name) for name in ("0", "1", "0_1", "1_1", "cmpl-abc-1")}) == 5
    assert max(request_number(str(i)) for i in range(100)) > 2**63


def test_logprobs_are_of_the_rows_that_asked() -> None:
    running = simulation()
    for name, wanted in zip("abc", (None, 2, 5), strict=True):
        running.add(name, PROMPTS[NAMES[0]], 4, logprobs=wanted)
    expected = answer(PROMPTS[NAMES[0]], 4)
    while running.scheduler.has_requests():
        _, result = running.step()
        if result.logprobs is None:
            continue
        for index, name in enumerate(result.req_ids):
            step = len(running.tokens[name]) - 1
            ids = result.logprobs.logprob_token_ids[index]
            context = PROMPTS[NAMES[0]] + expected[:step]
            oracle = torch.from_numpy(scores(context)).double().log_softmax(-1)
            assert ids[0] == ids[1] == expected[step] and result.logprobs.sampled_token_ranks[index] == 1
            np.testing.assert_allclose(result.logprobs.logprobs[index], oracle[ids], atol=1e-4)
    assert running.tokens == dict.fromkeys("abc", expected)


def test_allowed_tokens_and_grammars_act_together_on_their_rows_only() -> None:
    """Two grammar back ends in one engine, constrained and free rows in one batch."""
    running = simulation()
    digits = [tokenizer().convert_tokens_to_ids(digit) for digit in "0123456789"]
    running.add("regex", PROMPTS[NAMES[0]], 3, structured_outputs=constraint(regex="[0-9]{3}"))
    running.add("free", PROMPTS[NAMES[2]], 12)
    enum = {"enum": ["abcd", "wxyz"]}
    running.add("schema", PROMPTS[NAMES[4]], 6, temperature=1.0, structured_outputs=constraint(json=enum))
    both = constraint(regex="[0-9]{2}")
    running.add("both", PROMPTS[NAMES[5]], 2, temperature=2.0, allowed_token_ids=digits[:2], structured_outputs=both)
    while running.scheduler.has_requests():
        running.step()
    text = {name: tokenizer().decode(tokens, skip_special_tokens=True) for name, tokens in running.tokens.items()}
    assert len(text["regex"]) == 3 and text["regex"].isdigit()
    assert any(choice.startswith(text["schema"]) for choice in ('"abcd"', '"wxyz"'))
    assert set(running.tokens["both"]) <= set(digits[:2])
    assert running.tokens["free"] == answer(PROMPTS[NAMES[2]], 12)


def test_a_grammar_that_fails_ends_its_own_request_only() -> None:
    running = simulation()
    running.add("good", PROMPTS[NAMES[0]], 8)
    running.add("broken", PROMPTS[NAMES[1]], 8, structured_outputs=constraint(grammar="no grammar: at all ("))
    running.run()
    assert running.endings == {"good": "length", "broken": "error"}
    assert running.tokens == {"good": answer(PROMPTS[NAMES[0]], 8), "broken": []}


def test_a_constrained_row_without_a_mask_is_a_fault_and_not_free_text() -> None:
    running = simulation()
    running.add("a", PROMPTS[NAMES[0]], 4, structured_outputs=constraint(regex="[0-9]+"))
    running.scheduler.get_grammar_bitmask = lambda output: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no mask for request a"):
        for _ in range(100):
            running.step()


def test_masks_must_be_as_many_as_their_requests() -> None:
    masks = np.zeros((2, 20), np.int32)
    assert _masks(GrammarOutput(["a", "b"], masks), VOCAB_SIZE)["b"].shape == (16,)
    with pytest.raises(RuntimeError, match="2 masks for 1 requests"):
        _masks(GrammarOutput(["a"], masks), VOCAB_SIZE)


def test_a_grammar_may_fail_before_the_scheduler_has_its_request() -> None:
    running = simulation()
    request = SimpleNamespace(
        request_id="early",
        is_finished=lambda: False,
        structured_output_request=SimpleNamespace(
            structured_output_key=(StructuredOutputOptions.REGEX, "["), params=SimpleNamespace(_backend="xgrammar")
        ),
    )
    grammars: Any = running.scheduler._grammars
    assert grammars._compile(request) is None
    assert grammars.take_failed({}) == []
    assert grammars.take_failed({"early"}) == [request]
    assert grammars.take_failed({"early"}) == []


def test_prompts_of_embeddings_are_sampled_in_the_graphs_too() -> None:
    running = simulation(enable_prompt_embeds=True)
    prompt = PROMPTS[NAMES[3]]
    running.add("ids", prompt, 8)
    running.add("embeddings", embedded(prompt), 8)
    running.run()
    assert running.tokens == dict.fromkeys(("ids", "embeddings"), answer(prompt, 8))
