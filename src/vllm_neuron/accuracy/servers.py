"""Scores of a forced continuation from a running OpenAI server, in whichever way the server allows.

Log probabilities of the most likely tokens at each position come from `prompt_logprobs`, which is vLLM's and keyed by
token id, or, keyed by the token's text, from `echo` with `logprobs`, or from a request per position.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_neuron.accuracy.agreement import Scores

Prompt = str | Sequence[int]


class ServerError(RuntimeError):
    """A server cannot be asked, or does not tell what is needed; the text says which and why."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and the greedy continuation that one server gave it.

    Attributes:
        prompt: as token ids where the server tells them, else as text.
        pieces: what follows, a token each: ids or texts.
    """

    prompt: Prompt
    pieces: tuple[Any, ...]

    def prefix(self, count: int) -> Prompt:
        """The prompt and the first `count` tokens of the continuation."""
        if isinstance(self.prompt, str):
            return self.prompt + "".join(self.pieces[:count])
        return [*self.prompt, *self.pieces[:count]]


@dataclass
class OpenAIServer:
    """One running server.

    Attributes:
        url: with or without /v1.
        api_key: "none" where there is none.
        model: name that it serves the model under; by default the first that it lists.
        tokenizer: what it says the model's files are, else the model's name.
    """

    url: str
    api_key: str = "none"
    model: str = ""
    timeout: float = 600.0
    tokenizer: str = field(init=False)
    _client: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.api_key}"}
        self._client = httpx.Client(base_url=base, headers=headers, timeout=self.timeout)
        listed = self._send("GET", "/v1/models")["data"]
        self.model = self.model or str(listed[0]["id"])
        self.tokenizer = next((str(m["root"]) for m in listed if m["id"] == self.model and m.get("root")), self.model)

    def complete(self, prompt: Prompt, **parameters: Any) -> Mapping[str, Any]:
        """The first choice of a greedy completion.

        Raises:
            ServerError: there is no answer, or it is an error.
        """
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **parameters}
        answer: Mapping[str, Any] = self._send("POST", "/v1/completions", body)["choices"][0]
        return answer

    def close(self) -> None:
        """Let go of its connections."""
        self._client.close()

    def _send(self, method: str, path: str, body: object = None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(
                f"{self.url}: no answer to {method} {path}: {error!r}. Is it an OpenAI server?"
            ) from error
        if response.status_code != 200:
            raise ServerError(f"{self.url}: {path} answers {response.status_code}: {response.text[:300]}")
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"{self.url}: {path} answers no JSON: {response.text[:100]!r}") from error


def continue_greedily(server: OpenAIServer, prompt: str, tokens: int) -> Continuation:
    """The server's greedy continuation of a text by up to `tokens` tokens.

    Raises:
        ServerError: the server does not answer, or names no tokens.
    """
    choice = server.complete(prompt, max_tokens=tokens, logprobs=1, return_token_ids=True)
    if choice.get("token_ids") and choice.get("prompt_token_ids"):
        return Continuation(list(choice["prompt_token_ids"]), tuple(choice["token_ids"]))
    pieces = (choice.get("logprobs") or {}).get("tokens")
    if not pieces:
        raise ServerError(f"{server.url}: a completion with logprobs=1 names no tokens")
    return Continuation(prompt, tuple(pieces))


Method = Callable[[OpenAIServer, Continuation, int], list[Scores]]


def by_prompt_logprobs(server: OpenAIServer, forced: Continuation, k: int) -> list[Scores]:
    """Scores of each token of the continuation, by token id, in one request that generates one more."""
    choice = server.complete(forced.prefix(len(forced.pieces)), max_tokens=1, prompt_logprobs=k)
    rows = choice.get("prompt_logprobs")
    if not rows:
        raise ServerError(f"{server.url}: prompt_logprobs is not answered")
    # A server may name the given token beside the k most likely ones: only those count.
    return [
        {int(token): float(entry["logprob"]) for token, entry in row.items() if entry.get("rank", 1) <= k}
        for row in rows[-len(forced.pieces) :]
    ]


def by_echo(server: OpenAIServer, forced: Continuation, k: int) -> list[Scores]:
    """Scores of each token of the continuation, by text, in one request that repeats the prompt."""
    whole = forced.prefix(len(forced.pieces))
    rows = (server.complete(whole, max_tokens=1, echo=True, logprobs=k).get("logprobs") or {}).get("top_logprobs")
    if not rows or len(rows) <= len(forced.pieces):
        raise ServerError(f"{server.url}: echo with logprobs does not name the prompt's tokens")
    return [_by_text(row, k) for row in rows[-len(forced.pieces) - 1 : -1]]


def step_by_step(server: OpenAIServer, forced: Continuation, k: int) -> list[Scores]:
    """Scores of each token of the continuation, by text, in a request each."""
    rows = []
    for count in range(len(forced.pieces)):
        choice = server.complete(forced.prefix(count), max_tokens=1, logprobs=k)
        found = (choice.get("logprobs") or {}).get("top_logprobs")
        if not found:
            raise ServerError(f"{server.url}: a completion with logprobs={k} names no scores")
        rows.append(_by_text(found[0], k))
    return rows


METHODS: Mapping[str, Method] = {
    "prompt_logprobs": by_prompt_logprobs,
    "echo": by_echo,
    "a request per token": step_by_step,
}
"""In order of preference: the first that both servers answer is used for both."""


def scores_of_both(
    first: OpenAIServer, second: OpenAIServer, forced: Continuation, k: int
) -> tuple[str, list[Scores], list[Scores]]:
    """The name of the method that both servers answer, and the scores of each.

    Raises:
        ServerError: there is no such method; says what each server answered.
    """
    refusals = []
    for name, method in METHODS.items():
        try:
            return name, method(first, forced, k), method(second, forced, k)
        except ServerError as error:
            refusals.append(f"{name}: {error}")
    raise ServerError("no way of asking for scores works on both servers:\n" + "\n".join(refusals))


def _by_text(row: Mapping[str, float] | None, k: int) -> Scores:
    """The k most likely tokens of a row."""
    ranked: list[tuple[Hashable, float]] = sorted((row or {}).items(), key=lambda item: -float(item[1]))
    return dict(ranked[:k])
