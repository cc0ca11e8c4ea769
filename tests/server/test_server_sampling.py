"""On-device sampling, logprobs and structured outputs through the HTTP interface."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.checkpoints import greedy_oracle, logits_oracle, prompt
from tests.server.harness import MODEL_NAME, TINY_ARGS, Server, http, serving

IDS = prompt(30, seed=21)
DEFAULTS = {"temperature": "0.7", "top_k": 50, "top_p": "0.95"}
ARGS = (*TINY_ARGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
ENOUGH = 400
"""Tokens for any constrained answer: a model that knows nothing puts many blanks wherever JSON allows them."""

SCHEMA = {
    "type": "object",
    "properties": {
        "brand": {"enum": ["Ford", "Fiat"]},
        "year": {"type": "integer", "minimum": 10, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["brand", "year", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note_car", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def sampling(backend: str, tiny: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server per route for all tests of this file."""
    buckets = {"num_batched_tokens_buckets": [512], "num_seqs_buckets": [1, 4]}
    config = {"neuron_config": {**buckets, "on_device_sampling_config": DEFAULTS}}
    with serving(tiny, backend, tmp_path_factory.mktemp("sampling"), cache, ARGS, config) as running:
        yield running
        statistics = running.rpc("graph_statistics")
        assert statistics["compiles_after_warmup"] == 0
        assert statistics["executions"] and all(name.endswith("_sampled") for name in statistics["executions"])


def post(server: Server, body: dict[str, Any], chat: bool = False, request_id: str | None = None) -> tuple[int, Any]:
    path = "chat/completions" if chat else "completions"
    asked = {"messages": [{"role": "user", "content": "abc"}]} if chat else {"prompt": IDS}
    # The number that a request draws its random numbers by comes from its id.
    extra = {} if request_id is None else {"request_id": request_id}
    return http("POST", f"{server.url}/v1/{path}", {"model": MODEL_NAME, "max_tokens": 8, **asked, **extra, **body})


def completion(server: Server, request_id: str | None = None, **body: Any) -> Any:
    status, reply = post(server, {"ignore_eos": True, "return_token_ids": True, **body}, request_id=request_id)
    assert status == 200, reply
    return reply["choices"][0]


def constrained(server: Server, constraint: dict[str, Any], **body: Any) -> str:
    status, reply = post(server, {"structured_outputs": constraint, "max_tokens": ENOUGH, **body})
    assert status == 200, reply
    assert reply["choices"][0]["finish_reason"] == "stop", reply
    return str(reply["choices"][0]["text"])


def assert_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def test_server_greedy_equals_the_oracle(sampling: Server, tiny: Path) -> None:
    assert completion(sampling, temperature=0)["token_ids"] == greedy_oracle(tiny, IDS, 8)


def test_server_defaults_are_those_of_the_option(sampling: Server, tiny: Path) -> None:
    unset = completion(sampling, "same")["token_ids"]
    given = completion(sampling, "same", temperature=0.7, top_k=50, top_p=0.95)["token_ids"]
    other = completion(sampling, "same", temperature=2.0, top_k=0, top_p=1.0)["token_ids"]
    assert unset == given != other
    assert unset != greedy_oracle(tiny, IDS, 8)


def test_server_requests_differ_and_their_batch_does_not_matter(sampling: Server) -> None:
    names = [f"name-{i}" for i in range(8)]
    alone = [completion(sampling, name, temperature=1.5)["token_ids"] for name in names]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda name: completion(sampling, name, temperature=1.5)["token_ids"], names))
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == 8


def test_server_three_choices_differ(sampling: Server) -> None:
    status, reply = post(sampling, {"n": 3, "temperature": 1.5})
    assert status == 200 and len({choice["text"] for choice in reply["choices"]}) == 3


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_server_logprobs_are_the_models(sampling: Server, tiny: Path, temperature: float) -> None:
    choice = completion(sampling, temperature=temperature, logprobs=20, return_tokens_as_token_ids=True)
    ids, logprobs = choice["token_ids"], choice["logprobs"]
    oracle = logits_oracle(tiny, IDS + ids)[len(IDS) - 1 : -1].double().log_softmax(-1)
    for step, (token, value, top) in enumerate(
        zip(ids, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    ):
        assert value == pytest.approx(float(oracle[step, token]), abs=1e-3)
        best = oracle[step].topk(20).indices.tolist()
        assert {f"token_id:{i}" for i in best} <= set(top) and len(top) in (20, 21)


def test_server_chat_logprobs_are_not_empty(sampling: Server) -> None:
    status, reply = post(sampling, {"logprobs": True, "top_logprobs": 2, "ignore_eos": True}, chat=True)
    assert status == 200
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == 8 and all(len(token["top_logprobs"]) == 2 for token in content)


REFUSED: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {"5": -100}},
    "min_tokens": {"min_tokens": 5},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "top_k": {"top_k": 257},
    "logprobs": {"logprobs": 5, "allowed_token_ids": [7, 8]},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", REFUSED)
def test_server_refuses_by_name_what_graphs_cannot_do(sampling: Server, name: str, stream: bool) -> None:
    status, answer = post(sampling, {"temperature": 1.0, "stream": stream, **REFUSED[name]})
    assert status == 400, answer
    assert name in answer["error"]["message"]
    # vLLM itself refuses prompt logprobs in a stream.
    assert "on_device_sampling_config" in answer["error"]["message"] or (stream and name == "prompt_logprobs")


def test_server_allowed_token_ids(sampling: Server) -> None:
    assert set(completion(sampling, temperature=2.0, allowed_token_ids=[31, 32, 511])["token_ids"]) <= {31, 32, 511}
    assert completion(sampling, temperature=0, allowed_token_ids=[7])["token_ids"] == [7] * 8


CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": ["Positive", "Negative"]}, "Positive|Negative"),
    "regex": ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
    "grammar": ({"grammar": 'root ::= "a" ("b" | "c")+ "d"'}, "a[bc]+d"),
    # A feature that only the other back end knows.
    "guidance": ({"grammar": "start: /x{2,4}/ NAME\nNAME: /[A-C]{2}/"}, "x{2,4}[A-C]{2}"),
}


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_server_structured_outputs_obey(sampling: Server, kind: str, temperature: float) -> None:
    constraint, pattern = CONSTRAINTS[kind]
    assert re.fullmatch(pattern, constrained(sampling, constraint, temperature=temperature))


def test_server_json_schema(sampling: Server) -> None:
    assert_schema(constrained(sampling, {"json": SCHEMA}))
    schema = {"type": "json_schema", "json_schema": {"name": "car", "schema": SCHEMA}}
    status, reply = post(sampling, {"response_format": schema, "max_tokens": ENOUGH}, chat=True)
    assert status == 200, reply
    assert_schema(reply["choices"][0]["message"]["content"])


def test_server_json_object(sampling: Server) -> None:
    """Random weights may open objects for ever; what there is of the answer is the beginning of one."""
    body = {"response_format": {"type": "json_object"}, "max_tokens": ENOUGH, "temperature": 1.0}
    status, reply = post(sampling, body, chat=True)
    assert status == 200, reply
    answer = reply["choices"][0]
    assert answer["message"]["content"].lstrip().startswith("{")
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "note_car"}}], ids=str)
def test_server_tool_calls(sampling: Server, choice: Any) -> None:
    """The model calls on and on where it may; vLLM refuses an answer that ends within a call."""
    body = {"tools": [TOOL], "tool_choice": choice, "max_tokens": ENOUGH}
    answers = (post(sampling, body, chat=True, request_id=f"tools-{attempt}") for attempt in range(20))
    reply = next(reply for status, reply in answers if status == 200)
    calls = reply["choices"][0]["message"]["tool_calls"]
    assert calls and {call["function"]["name"] for call in calls} == {"note_car"}
    for call in calls:
        assert_schema(call["function"]["arguments"])


def test_server_streams_structured_outputs(sampling: Server) -> None:
    chunks = sampling.client.completions.create(
        model=MODEL_NAME,
        prompt=IDS,
        max_tokens=ENOUGH,
        stream=True,
        extra_body={"structured_outputs": {"json": SCHEMA}},
    )
    assert_schema("".join(chunk.choices[0].text for chunk in chunks))


HARMLESS: tuple[dict[str, Any], ...] = (
    {"grammar": "root ::="},
    {"regex": "(a{1,5000}){1,5000}"},
    {"json": {}},
    {"regex": "^(|.*)$"},
)
"""Odd constraints that need not be refused, but must hold up nobody."""

INVALID: dict[str, dict[str, Any]] = {
    "regex of an open group": {"regex": "(["},
    "empty JSON": {"json": ""},
    "broken JSON": {"json": "{"},
    "unknown JSON type": {"json": {"type": "banana"}},
    "no choice": {"choice": []},
    "grammar that is none": {"grammar": "root ::= ("},
    "json_object off": {"json_object": False},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_server_invalid_constraints_are_refused_and_harm_nobody(sampling: Server, tiny: Path, stream: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(completion, sampling, temperature=0, max_tokens=300)
        answers = {name: post(sampling, {"structured_outputs": c, "stream": stream}) for name, c in INVALID.items()}
        assert {name: status for name, (status, _) in answers.items() if status != 400} == {}, answers
        for constraint in HARMLESS:
            assert post(sampling, {"structured_outputs": constraint, "stream": stream})[0] in (200, 400)
        assert len(long.result()["token_ids"]) == 300
    assert sampling.health() == 200
    assert completion(sampling, temperature=0)["token_ids"] == greedy_oracle(tiny, IDS, 8)


def test_server_forty_constrained_requests_among_plain_ones(sampling: Server, tiny: Path) -> None:
    """All obey, and the plain ones get what they get alone."""
    prompts = [prompt(20, seed=i) for i in range(12)]

    def plain(index: int) -> list[int]:
        return list(completion(sampling, prompt=prompts[index], temperature=0, max_tokens=12)["token_ids"])

    def bound(index: int) -> None:
        temperature = index % 3 / 2
        if index % 2:
            assert_schema(constrained(sampling, {"json": SCHEMA}, temperature=temperature))
        else:
            constraint, pattern = list(CONSTRAINTS.values())[index // 2 % len(CONSTRAINTS)]
            assert re.fullmatch(pattern, constrained(sampling, constraint, temperature=temperature))

    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(bound, index) for index in range(40)]
        outputs = [pool.submit(plain, index) for index in range(12)]
        for job in jobs:
            job.result()
        assert [output.result() for output in outputs] == [greedy_oracle(tiny, ids, 12) for ids in prompts]
