"""A stock OpenAI client against `vllm serve`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import openai_mix
from tests.server.harness import BACKENDS, MODEL_NAME, Server, serving

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LOGITS = ("chat", "chat, logprobs", "completion, echo and logprobs", "completion, three prompts")
"""Requests that show what the graphs compute."""


@pytest.fixture(scope="module")
def demo(backend: str, demo_model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "2", "--max-num-batched-tokens", "128")
    args += ("--num-gpu-blocks-override", "64", *openai_mix.TOOL_ARGS)
    config = {"neuron_config": {"num_seqs_buckets": [2]}}
    with serving(demo_model, backend, tmp_path_factory.mktemp("demo"), cache, args, config) as running:
        yield running


def test_server_real_model_knows_the_capital_of_france(demo: Server) -> None:
    reply = demo.client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens <= 32


def test_server_real_model_streams_the_same_text(demo: Server) -> None:
    arguments = {"model": MODEL_NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = demo.client.chat.completions.create(**arguments).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in demo.client.chat.completions.create(**arguments, stream=True)
        if chunk.choices
    ]
    assert len(pieces) > 3
    assert "".join(pieces) == whole


def test_server_real_model_continues_a_conversation(demo: Server) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "Paris."}]
    messages += [{"role": "user", "content": "And of Italy?"}]
    reply = demo.client.chat.completions.create(model=MODEL_NAME, messages=messages, temperature=0, max_tokens=24)
    assert "Rome" in reply.choices[0].message.content


def test_server_real_model_answers_two_at_once_as_it_answers_each(demo: Server) -> None:
    texts = ["The three primary colors are", "Water boils at a temperature of"]
    arguments = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 16}
    alone = [demo.client.completions.create(prompt=text, **arguments).choices[0].text for text in texts]
    together = demo.client.completions.create(prompt=texts, **arguments)
    assert [choice.text for choice in together.choices] == alone


@pytest.mark.parametrize("name", LOGITS)
def test_server_real_model_answers_as_vllms_cpu_backend(demo: Server, name: str) -> None:
    """The answers on record are those of vLLM's own CPU backend to the same client, in float32."""
    assert_answer_on_record(demo, name)


@pytest.mark.parametrize("backend", BACKENDS[:1], indirect=True)
@pytest.mark.parametrize("name", [name for name in openai_mix.REQUESTS if name not in LOGITS])
def test_server_real_model_answers_the_rest_of_the_mix_as_vllms_cpu_backend(demo: Server, name: str) -> None:
    """On one route: vLLM makes these answers of logits, whatever the route."""
    assert_answer_on_record(demo, name)


def assert_answer_on_record(demo: Server, name: str) -> None:
    want = json.loads(openai_mix.ANSWERS.read_text())[name]
    got = json.loads(json.dumps(openai_mix.REQUESTS[name](demo.client, MODEL_NAME)))
    assert _without_floats(got) == _without_floats(want)
    assert _floats(got) == pytest.approx(_floats(want), abs=2e-3)


def _without_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_floats(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_floats(part) for part in value]
    return "a number" if isinstance(value, float) else value


def _floats(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in _floats(part)]
    return [value] if isinstance(value, float) else []


def test_server_lists_its_model(server: Server) -> None:
    models = server.client.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [(MODEL_NAME, 512)]


def test_server_chat_counts_its_tokens(server: Server) -> None:
    messages = [{"role": "user", "content": "abc"}]
    reply = server.client.chat.completions.create(
        model=MODEL_NAME, messages=messages, temperature=0, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 5
    # The template adds <|user|>, a line end and <|assistant|>; each byte is a token.
    assert reply.usage.prompt_tokens == len("<|user|>abc\n<|assistant|>")
