"""Completion requests by token id, whose answers a float32 oracle knows."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.checkpoints import greedy_oracle, prompt
from tests.server.harness import MODEL_NAME, Server


def complete(server: Server, ids: list[int], max_tokens: int, **extra: Any) -> Any:
    """A greedy completion that end-of-sequence does not stop, unless `extra` says otherwise."""
    body = {"ignore_eos": True, "return_token_ids": True, **extra}
    known = {
        name: body.pop(name) for name in ("n", "stop", "stream", "logprobs", "seed", "temperature") if name in body
    }
    return server.client.completions.create(
        model=MODEL_NAME, prompt=ids, max_tokens=max_tokens, extra_body=body, **{"temperature": 0, **known}
    )


def token_ids(server: Server, ids: list[int], max_tokens: int, **extra: Any) -> list[int]:
    return list(complete(server, ids, max_tokens, **extra).choices[0].token_ids)


def all_at_once(server: Server, prompts: Iterable[list[int]], max_tokens: int, concurrency: int) -> list[list[int]]:
    """Token ids of every completion; `concurrency` requests are open at any time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda ids: token_ids(server, ids, max_tokens), prompts))


def assert_next_is_right(server: Server, model: Path, seed: int = 77) -> None:
    """The server is alive and computes what it should."""
    ids = prompt(40, seed)
    assert server.health() == 200
    assert token_ids(server, ids, 8) == greedy_oracle(model, ids, 8)


def decode_steps(server: Server) -> dict[str, int]:
    """Executions per decode graph."""
    executions = server.rpc("graph_statistics")["executions"]
    return {name: count for name, count in executions.items() if name.startswith("decode")}
