"""Grammar masks and prompt logprobs on the host."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from tests.plugin.simulation import Simulation, make_config, prompts
from vllm_neuron.plugin.host_sampling import PIECE_ROWS, PromptLogprobs, apply_grammar

VOCAB = 40


def mask_of(allowed: list[int]) -> np.ndarray:
    """A bit mask [1, ceil(V / 32)] that allows these tokens."""
    words = np.zeros((1, -(-VOCAB // 32)), np.int64)
    for token in allowed:
        words[0, token // 32] |= 1 << (token % 32)
    return words.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize(
    "constrained",
    [{"b": [3]}, {"c": [39], "a": [0, 31, 32]}, {"a": [1], "b": [2], "c": [3]}, {"c": list(range(VOCAB)), "b": [0]}],
)
def test_masks_reach_the_rows_they_are_for(constrained: dict[str, list[int]]) -> None:
    names = ["a", "b", "c"]
    rows = {name: index for index, name in enumerate(names)}
    batch: Any = SimpleNamespace(input_batch=SimpleNamespace(req_id_to_index=rows))
    # What lies behind the last row belongs to somebody else.
    memory = torch.randn(4 * VOCAB, generator=torch.Generator().manual_seed(0))
    logits, others = memory[: 3 * VOCAB].view(3, VOCAB), memory[3 * VOCAB :].clone()
    wanted = logits.clone()
    for name, allowed in constrained.items():
        forbidden = [token for token in range(VOCAB) if token not in allowed]
        wanted[names.index(name), forbidden] = -torch.inf
    grammar = GrammarOutput(list(constrained), np.concatenate([mask_of(a) for a in constrained.values()]))
    apply_grammar(grammar, batch, logits)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=0)
    assert torch.equal(memory[3 * VOCAB :], others)


class Head:
    """In place of `GraphExecutor`: hidden [n, 1] holds positions, and a position's logits are a row of a table."""

    def __init__(self, length: int) -> None:
        self.table = torch.randn(length, VOCAB, generator=torch.Generator().manual_seed(1))
        self.most_rows = 0

    def prompt_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        return self.table[hidden[:, 0].long()].clone()


def request(length: int, **sampling: Any) -> CachedRequestState:
    params = SamplingParams(**sampling)
    prompt = [(7 * index) % VOCAB for index in range(length)]
    return CachedRequestState("name", prompt, [], params, None, ([],), 0, [])


@pytest.mark.parametrize("length", [1, 2, 5, 300])
@pytest.mark.parametrize("chunk", [1, 2, 7, 500])
@pytest.mark.parametrize("wanted", [0, 3, -1])
def test_prompt_logprobs_over_chunks_equal_the_formula(length: int, chunk: int, wanted: int) -> None:
    head, state = Head(length), request(length, prompt_logprobs=wanted)
    executor: Any = head
    collector = PromptLogprobs(executor, Sampler(), VOCAB)
    found = None
    for start in range(0, length, chunk):
        assert found is None, "only the last chunk returns anything"
        end = min(start + chunk, length)
        found = collector.add(state, start, torch.arange(start, end, dtype=torch.float32)[:, None])
    assert found is not None
    count = VOCAB if wanted == -1 else wanted
    assert found.logprobs.shape == (length - 1, count + 1)
    oracle = torch.log_softmax(head.table.double(), dim=-1)
    for position, target in enumerate((state.prompt_token_ids or [])[1:]):
        ids, values = found.logprob_token_ids[position].tolist(), found.logprobs[position]
        assert ids[0] == target
        torch.testing.assert_close(values.double(), oracle[position, ids], rtol=0, atol=1e-5)
        assert ids[1:] == oracle[position].topk(count).indices.tolist()
        assert found.selected_token_ranks[position] == (oracle[position] >= oracle[position, target]).sum()
    assert head.most_rows <= PIECE_ROWS


def test_prompt_logprobs_are_given_once_and_only_if_asked_for() -> None:
    executor: Any = Head(4)
    collector = PromptLogprobs(executor, Sampler(), VOCAB)
    hidden = torch.arange(4, dtype=torch.float32)[:, None]
    assert collector.add(request(4), 0, hidden) is None
    state = request(4, prompt_logprobs=1)
    assert collector.add(state, 0, hidden) is not None
    state.output_token_ids.append(9)
    assert collector.add(state, 0, hidden) is None, "a request that computes its prompt again has had them"


def test_a_part_of_a_prompt_draws_no_random_number() -> None:
    (prompt,) = prompts([50])
    split = Simulation(make_config(max_num_batched_tokens=16), 64)
    whole = Simulation(make_config(max_num_batched_tokens=64), 64)
    for simulation in (split, whole):
        simulation.add("name", prompt, 8, temperature=1.0, seed=3)
        simulation.run()
    assert split.executor.steps.count(("prefill", 16)) == 3 and ("prefill", 50) in whole.executor.steps
    assert split.tokens == whole.tokens


def test_sampling_parameters_stay_with_their_requests_as_others_come_and_go() -> None:
    # Each request may give one token only, so any mix-up of rows shows.
    simulation = Simulation(make_config(), 64)
    for index, prompt in enumerate(prompts([3, 9, 5, 4, 6, 8, 7])):
        simulation.add(str(index), prompt, 2 + 3 * (index % 3), temperature=index % 2, allowed_token_ids=[100 + index])
    simulation.run()
    for name, tokens in simulation.tokens.items():
        assert set(tokens) == {100 + int(name)} and len(tokens) == 2 + 3 * (int(name) % 3)
