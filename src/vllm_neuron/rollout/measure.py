"""What OpenAI servers do with a set of prompts: health, greedy answers, time to first token and between tokens."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colours are",
    "def fibonacci(n):\n    ",
    "Translate to German: The weather is nice today.\n",
    "A list of five fruits: apple,",
    "In the beginning of the nineteenth century,",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
)
"""Asked unless others are given. Put prompts of your own traffic in their place."""


@dataclass
class Measurement:
    """One server.

    Attributes:
        url: its root.
        fault: why it cannot be asked at all, or "".
        model: the model it lists first.
        answers: text by index of the prompt; of several rounds the last one.
        failures: requests that were not answered, a line each.
        ttft: seconds to the first token, a value per answer.
        itl: mean seconds between events that bring text (a token each, if the server keeps up), a value per answer of
            two events or more.
    """

    url: str
    fault: str = ""
    model: str = ""
    answers: dict[int, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)


def measure(
    urls: Sequence[str],
    prompts: Sequence[str] = PROMPTS,
    *,
    max_tokens: int = 16,
    rounds: int = 3,
    timeout: float = 60.0,
    api_key: str = "",
) -> list[Measurement]:
    """Ask every server each prompt, in turn, so that what disturbs one disturbs the other.

    One more request goes first to each and is not timed.

    Args:
        urls: roots of the servers.
        prompts: what to ask; greedy, at most `max_tokens` tokens each.
        max_tokens: of an answer.
        rounds: how often each prompt is asked.
        timeout: seconds to wait for a connection or for the next token.
        api_key: sent as a bearer token if not empty.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(timeout=timeout, headers=headers) as client:
        found = [_introduce(client, root(url)) for url in urls]
        usable = [server for server in found if not server.fault]
        for server in usable:
            _ask(client, Measurement(server.url, model=server.model), 0, prompts[0], max_tokens)
        for _ in range(rounds):
            for index, prompt in enumerate(prompts):
                for server in usable:
                    _ask(client, server, index, prompt, max_tokens)
    return found


def root(url: str) -> str:
    """A server's URL without a slash or /v1 at its end."""
    return url.rstrip("/").removesuffix("/v1")


def _introduce(client: httpx.Client, url: str) -> Measurement:
    server = Measurement(url)
    try:
        client.get(f"{url}/health").raise_for_status()
        listed = client.get(f"{url}/v1/models").raise_for_status().json()["data"]
        server.model = listed[0]["id"]
    except httpx.HTTPError as error:
        server.fault = _words(error)
    except (ValueError, LookupError, TypeError) as error:
        server.fault = f"/v1/models lists no model: {_words(error)}"
    return server


def _ask(client: httpx.Client, server: Measurement, index: int, prompt: str, max_tokens: int) -> None:
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    text, times, start = "", [], time.perf_counter()
    try:
        with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
            for line in response.iter_lines():
                piece = _piece(line)
                if piece:
                    text += piece
                    times.append(time.perf_counter())
    except (httpx.HTTPError, ValueError) as error:
        server.failures.append(f"prompt {index}: {_words(error)}")
        return
    if not times:
        server.failures.append(f"prompt {index}: an empty answer")
        return
    server.answers[index] = text
    server.ttft.append(times[0] - start)
    if len(times) > 1:
        server.itl.append((times[-1] - times[0]) / (len(times) - 1))


def _piece(line: str) -> str:
    """The text that a line of the event stream brings.

    Raises:
        ValueError: the line is an error of the server, or no JSON.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return ""
    event: Mapping[str, Any] = json.loads(data)
    if "error" in event:
        raise ValueError(str(event["error"])[:200])
    return "".join(choice.get("text") or "" for choice in event.get("choices", ()))


def _words(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
