"""A mix of requests by a stock OpenAI client, and what vLLM's own CPU backend answers to them.

    python -m tests.server.openai_mix URL MODEL > tests/server/openai_mix.json

records the answers of a server. Those kept are of vLLM 0.16's CPU backend on the demo model:

    vllm serve MODEL --dtype float32 --max-model-len 512 --max-num-seqs 2 --enable-auto-tool-choice \
        --tool-call-parser hermes
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

ANSWERS = Path(__file__).with_suffix(".json")
TOOL_ARGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

_PROMPT = "The three primary colors are"
_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "country": {"enum": ["France", "Italy"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def _chat(**arguments: Any) -> Callable[[openai.OpenAI, str], Any]:
    def ask(client: openai.OpenAI, model: str) -> Any:
        given = {"messages": _QUESTION, "max_tokens": 24, "temperature": 0} | arguments
        reply = client.chat.completions.create(model=model, **given)
        return [
            {
                "content": choice.message.content,
                "finish": choice.finish_reason,
                "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []],
                "logprobs": _chat_logprobs(choice.logprobs),
            }
            for choice in reply.choices
        ]

    return ask


def _completion(**arguments: Any) -> Callable[[openai.OpenAI, str], Any]:
    def ask(client: openai.OpenAI, model: str) -> Any:
        given = {"prompt": _PROMPT, "max_tokens": 16, "temperature": 0} | arguments
        reply = client.completions.create(model=model, **given)
        return [
            {
                "text": choice.text,
                "finish": choice.finish_reason,
                "tokens": choice.logprobs and choice.logprobs.tokens,
                "logprobs": choice.logprobs and choice.logprobs.token_logprobs,
                "top": choice.logprobs and choice.logprobs.top_logprobs,
            }
            for choice in reply.choices
        ]

    return ask


def _chat_stream(client: openai.OpenAI, model: str) -> Any:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=_QUESTION, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return {
        "pieces": [choice.delta.content for choice in choices if choice.delta.content],
        "finish": choices[-1].finish_reason,
        "usage": [chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens],
    }


def _completion_stream(client: openai.OpenAI, model: str) -> Any:
    chunks = client.completions.create(model=model, prompt=_PROMPT, max_tokens=12, temperature=0, stream=True)
    return [chunk.choices[0].text for chunk in chunks]


def _chat_logprobs(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [[one.token, one.logprob, {top.token: top.logprob for top in one.top_logprobs}] for one in logprobs.content]


REQUESTS: dict[str, Callable[[openai.OpenAI, str], Any]] = {
    "chat": _chat(),
    "chat, streamed": _chat_stream,
    "chat, logprobs": _chat(logprobs=True, top_logprobs=3, max_tokens=8),
    "chat, three sampled answers": _chat(n=3, temperature=0.8, top_p=0.9, seed=7),
    "chat, JSON schema": _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA, "strict": True}},
        max_tokens=48,
    ),
    "chat, named tool": _chat(
        tools=[_WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=48
    ),
    "completion": _completion(),
    "completion, streamed": _completion_stream,
    "completion, echo and logprobs": _completion(echo=True, logprobs=3, max_tokens=6),
    "completion, three prompts": _completion(prompt=[_PROMPT, "Water boils at", "Once upon a time"]),
    "completion, stop string": _completion(stop=[" blue"], max_tokens=32),
    "completion, penalties": _completion(frequency_penalty=1.0, presence_penalty=0.5, max_tokens=24),
    "completion, logit bias": _completion(logit_bias={"1500": 4.0}, max_tokens=12),
    "completion, sampled with top_k and min_p": _completion(
        temperature=0.7, seed=11, extra_body={"top_k": 20, "min_p": 0.05}
    ),
    "completion, regex": _completion(
        prompt="Call me at ", max_tokens=24, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}
    ),
    "completion, choice": _completion(
        prompt="Is Rome in Italy? ", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    ),
}


if __name__ == "__main__":
    asker = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", timeout=300)
    print(json.dumps({name: ask(asker, sys.argv[2]) for name, ask in REQUESTS.items()}, indent=1))
