"""Async scheduling changes when the host learns of tokens, and nothing else."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from tests.checkpoints import checkpoint, greedy_oracle
from tests.serving.engine import BACKENDS, metric, prompt, running_llm, statistics

NUM_REQUESTS = 300
SAMPLING: dict[str, Any] = {
    "neuron_config": {"num_seqs_buckets": [2, 4], "num_batched_tokens_buckets": [128], "on_device_sampling_config": {}}
}
ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 17,  # two requests of full length: four together are preempted now and then
    "additional_config": SAMPLING,
    "disable_log_stats": False,  # preemptions are counted
}

SCHEMA = {
    "type": "object",
    "properties": {"brand": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "n": {"enum": [1, 22, 333]}},
    "required": ["brand", "n"],
    "additionalProperties": False,
}


@dataclass
class Answer:
    """What became of a request: its tokens so far, and why it ended."""

    token_ids: list[int]
    reason: str | None = None


def requests() -> list[tuple[str, list[int], dict[str, Any]]]:
    """Ids, prompts and sampling parameters; every eighth prompt is one that was there before."""
    rng = random.Random(0)
    found: list[tuple[str, list[int], dict[str, Any]]] = []
    for index in range(NUM_REQUESTS):
        ids = prompt(rng.randrange(1, 200), seed=index)
        if index % 8 == 7:
            ids = found[rng.randrange(len(found))][1]
        elif index % 30 == 20:
            ids = prompt(250, seed=index)  # its answer ends where the model's length does
        sampling = {
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0.0, 0.7, 1.3]),
            "top_p": rng.choice([1.0, 0.8]),
            "top_k": rng.choice([0, 20]),
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": rng.sample(range(512), rng.choice([0, 40])),
            "logprobs": rng.choice([None, None, 2]),
        }
        found.append((f"request-{index}", ids, sampling))
    return found


def drive(llm: Any, wanted: Sequence[tuple[str, list[int], dict[str, Any]]]) -> dict[str, Answer]:
    """Let requests join, a few at a time, and give up some of them while they run."""
    from vllm import SamplingParams

    engine, rng, waiting = llm.llm_engine, random.Random(1), list(reversed(wanted))
    answers: dict[str, Answer] = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 1, 2])):
            if waiting:
                req_id, ids, sampling = waiting.pop()
                answers[req_id] = Answer([])
                engine.add_request(req_id, {"prompt_token_ids": ids}, SamplingParams(**sampling))
        if rng.random() < 0.03 and answers:
            running = [req_id for req_id, answer in answers.items() if answer.reason is None]
            if running:
                answers[req_id := rng.choice(running)].reason = "given up"
                engine.abort_request([req_id])
        for output in engine.step():
            answer = answers[output.request_id]
            if answer.reason is None:
                answer.token_ids = list(output.outputs[0].token_ids)
                answer.reason = output.outputs[0].finish_reason
    return answers


def constrained(llm: Any) -> list[tuple[str, list[int], str | None]]:
    """Text, tokens and reason of end of 20 requests that must obey a schema and 4 that are free, all at once.

    The second ten are the first ten, cut off after 6 tokens.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    bound = [
        SamplingParams(temperature=0.0, max_tokens=limit, structured_outputs=StructuredOutputsParams(json=SCHEMA))
        for limit in [120] * 10 + [6] * 10
    ]
    free = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * 4
    prompts = [prompt(10 + index % 10, seed=1000 + index % 10) for index in range(24)]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], [*bound, *free], use_tqdm=False)
    # Not their text, which may begin with the other half of a character that a random prompt ends with.
    text_of = llm.get_tokenizer().decode
    found = [(list(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]
    return [(text_of(tokens, skip_special_tokens=True), tokens, reason) for tokens, reason in found]


def assert_obeys(answers: list[tuple[str, list[int], str | None]]) -> None:
    complete = [text for text, _, reason in answers[:10] if reason == "stop"]
    assert complete, "some end before they are cut off"
    for text in complete:
        jsonschema.validate(json.loads(text), SCHEMA)
    for (_, whole, _), (_, cut, reason) in zip(answers[:10], answers[10:20], strict=True):
        assert cut == whole[:6] and reason == "length"
    path = checkpoint("llama")
    for index, (_, tokens, _) in enumerate(answers[20:], start=20):
        assert tokens == greedy_oracle(path, prompt(10 + index % 10, seed=1000 + index % 10), 24)


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_async_scheduling_changes_no_token(backend: str) -> None:
    """Case ASY-2 is the second half: what a grammar allows advances once with each token, also one step ahead."""
    wanted = requests()
    answers, counters, obedient = {}, {}, {}
    for mode in (True, False):
        with running_llm(checkpoint("llama"), backend, async_scheduling=mode, **ENGINE) as llm:
            answers[mode] = drive(llm, wanted)
            counters[mode] = statistics(llm)
            assert metric(llm, "vllm:num_preemptions") > 0
            obedient[mode] = constrained(llm)
            assert statistics(llm)["compiles_after_warmup"] == 0
    for req_id, ahead in answers[True].items():
        in_step = answers[False][req_id]
        if "given up" in (ahead.reason, in_step.reason):
            # Given up at another token of the same answer.
            shorter, longer = sorted((ahead.token_ids, in_step.token_ids), key=len)
            assert longer[: len(shorter)] == shorter, req_id
        else:
            assert ahead == in_step, req_id
    complete = [a for a in answers[True].values() if a.reason != "given up"]
    assert len(complete) > 0.8 * NUM_REQUESTS and {a.reason for a in complete} == {"stop", "length"}
    assert obedient[True] == obedient[False]
    assert_obeys(obedient[True])
    assert counters[True]["async_steps"] > counters[True]["sync_fallback_steps"] > 0
    assert counters[False]["async_steps"] == counters[False]["sync_fallback_steps"] == 0
    assert counters[True]["compiles_after_warmup"] == counters[False]["compiles_after_warmup"] == 0
