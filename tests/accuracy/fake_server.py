"""An OpenAI server without a model: next-token scores follow from the last token, or are what a test makes of them."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 16
Choice = Callable[[dict[str, Any]], dict[str, Any]]


class Refusal(Exception):
    """Answered as 400."""


def scores(token: int, sharpness: float = 1.0) -> dict[int, float]:
    """Log probabilities of all tokens after `token`."""
    logits = [sharpness * math.cos(token * 1.7 + index * (1 + token % 3)) for index in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    return {index: logit - total for index, logit in enumerate(logits)}


def best(token: int, sharpness: float = 1.0) -> int:
    found = scores(token, sharpness)
    return max(found, key=lambda index: found[index])


@contextmanager
def answering(choice: Choice) -> Iterator[str]:
    """URL of a server whose completions have what `choice` makes of a request's body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "tiny", "root": "folder"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions" and body["model"] == "tiny" and body["temperature"] == 0
            try:
                self._send(200, {"choices": [choice(body)]})
            except Refusal as refusal:
                self._send(400, {"error": {"message": str(refusal)}})

        def _send(self, status: int, document: object) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(prompt_logprobs: bool = True, echo: bool = True, sharpness: float = 1.0, ids: bool = True) -> Choice:
    """What a server answers, by what it can do. Texts are decimal numbers with a space before each."""

    def top(token: int, k: int) -> dict[int, float]:
        found = scores(token, sharpness)
        return {index: found[index] for index in sorted(found, key=lambda index: -found[index])[:k]}

    def named(token: int, k: int) -> dict[str, float]:
        return {f" {index}": score for index, score in top(token, k).items()}

    def choice(body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        tokens = [int(word) for word in prompt.split()] if isinstance(prompt, str) else list(prompt)
        produced: list[int] = []
        for _ in range(body["max_tokens"]):
            produced.append(best((tokens + produced)[-1], sharpness))
        found: dict[str, Any] = {"text": "".join(f" {t}" for t in produced)}
        if ids and body.get("return_token_ids"):
            found |= {"token_ids": produced, "prompt_token_ids": tokens}
        everything = tokens + produced
        if (k := body.get("prompt_logprobs")) is not None:
            if not prompt_logprobs:
                raise Refusal("prompt_logprobs is not supported")
            rows = [top(token, k) for token in tokens[:-1]]
            found["prompt_logprobs"] = [
                None,
                *(
                    {
                        str(index): {"logprob": score, "rank": rank}
                        for rank, (index, score) in enumerate(row.items(), start=1)
                    }
                    for row in rows
                ),
            ]
        if (k := body.get("logprobs")) is not None:
            if body.get("echo") and not echo:
                raise Refusal("echo is not supported")
            first = 1 if body.get("echo") else len(tokens)
            rows_by_name = [named(token, k) for token in everything[first - 1 : -1]]
            shown = everything if body.get("echo") else produced
            found["logprobs"] = {
                "tokens": [f" {t}" for t in shown],
                "top_logprobs": [None, *rows_by_name] if body.get("echo") else rows_by_name,
            }
        return found

    return choice
