"""Many mixed requests at once against a real server, and whether it is afterwards as it was before.

    VLLM_NEURON_CPU_MODE=1 python benchmarks/soak.py MODEL_DIR [--requests 2000] [--concurrency 16] [--route ROUTE]

For each compile route: `vllm serve`, and short and long prompts, prompts with common prefixes, requests that are given
up in the middle, requests that must be refused, and constrained ones, in a random order that a seed fixes. Afterwards

- every request has ended as it should;
- nothing runs, nothing waits, and no KV block is in use;
- no process has more open files than after the first requests, and resident memory has not grown by more than 5 %;
- a sample of the answers equals what the same requests get when they are alone.

Prints a line of figures per route, and fails if one of these does not hold.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from vllm_neuron.comparison.server import MODEL_NAME, serving

ROUTES = ("neuron_native", "vllm_neuron")
KINDS = ("short", "long", "common prefix", "given up", "refused", "constrained")
SERVER = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--num-gpu-blocks-override", "96")
"""In float32 batches of any size give the same tokens."""
PREFIXES = 4
SETTLE_SECONDS = 20
GROWTH = 0.05
"""Of resident memory: allocators keep some of what they have once had."""


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        tokens: its max_model_len.
        vocab_size: V.
    """

    tokens: int
    vocab_size: int


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        kind: one of `KINDS`.
        body: of /v1/completions.
        chunks: of its stream that are read before it is given up; 0 reads all of the answer.
    """

    kind: str
    body: dict[str, Any]
    chunks: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of a request: the HTTP status, and the token ids of its answer, if it got one."""

    request: Request
    status: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Usage:
    """What the processes of a server hold: resident bytes, and open files of each."""

    resident: int
    files: dict[int, int]

    def opened_since(self, before: "Usage") -> dict[int, int]:
        """Of the processes that have more open files than before, how many they have."""
        return {process: files for process, files in self.files.items() if files > before.files.get(process, 0)}


@dataclass
class Report:
    """What a soak has found.

    Attributes:
        seconds: it took.
        ended: per kind, requests that ended as they should.
        faults: everything that is not as it should be, a line each.
        before: use of memory and files after the first tenth of the requests.
        after: the same at the end.
        compared: answers that were compared with those of requests alone.
    """

    seconds: float
    ended: Counter[str]
    before: Usage
    after: Usage
    compared: int
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        mib = [usage.resident / 2**20 for usage in (self.before, self.after)]
        files = [sum(usage.files.values()) for usage in (self.before, self.after)]
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.ended.items()))
        return (
            f"{self.ended.total()} requests in {self.seconds:.0f} s ({counts}); memory {mib[0]:.0f} -> {mib[1]:.0f} "
            f"MiB; open files {files[0]} -> {files[1]}; {self.compared} answers compared; {len(self.faults)} faults"
        )


def make_requests(count: int, limits: Limits, seed: int = 0, model: str = MODEL_NAME) -> list[Request]:
    """So many requests of all kinds; the same seed gives the same ones."""
    rng = random.Random(seed)
    prefixes = [_tokens(rng, limits, limits.tokens // 4) for _ in range(PREFIXES)]
    return [_make_request(rng, rng.choice(KINDS), model, limits, prefixes) for _ in range(count)]


def _make_request(rng: random.Random, kind: str, model: str, limits: Limits, prefixes: Sequence[list[int]]) -> Request:
    prompt = _tokens(rng, limits, rng.randint(1, 32))
    chunks = 0
    extra: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "ignore_eos": True}
    match kind:
        case "long":
            prompt = _tokens(rng, limits, rng.randint(limits.tokens // 2, limits.tokens - 16))
        case "common prefix":
            prompt = rng.choice(prefixes) + prompt
        case "given up":
            chunks = rng.randint(1, 4)
            extra |= {"max_tokens": limits.tokens // 2, "stream": True}
        case "refused":
            extra |= rng.choice(_bad_bodies(limits))
        case "constrained":
            extra = {"max_tokens": 24, "structured_outputs": {"regex": rng.choice(("[a-f]{3}-[0-9]{2}", "(yes|no)"))}}
    body = {"model": model, "temperature": 0, "return_token_ids": True, "prompt": prompt, **extra}
    return Request(kind, body, chunks)


def _bad_bodies(limits: Limits) -> list[dict[str, Any]]:
    return [
        {"prompt": [5] * limits.tokens},
        {"prompt": [limits.vocab_size]},
        {"prompt": []},
        {"temperature": -1},
        {"max_tokens": 0},
        {"top_p": 2},
        {"structured_outputs": {"regex": "["}},
        {"model": "another"},
    ]


def _tokens(rng: random.Random, limits: Limits, count: int) -> list[int]:
    return [rng.randrange(3, limits.vocab_size) for _ in range(count)]


async def soak(
    url: str, pid: int, model: str, limits: Limits, requests: int, concurrency: int, compare: int, seed: int = 0
) -> Report:
    """Send the requests and look at what is left.

    Args:
        url: of the server.
        pid: of its first process.
        model: its name.
        limits: what it takes.
        requests: how many.
        concurrency: open at any time.
        compare: answers that are compared with those of the same request alone.
        seed: of requests and sample.
    """
    todo = make_requests(requests, limits, seed, model)
    first = requests // 10
    begin = time.monotonic()
    outcomes = await send_all(url, todo[:first], concurrency)
    faults = await _settled(url)
    before = usage(pid)
    outcomes += await send_all(url, todo[first:], concurrency)
    faults += await _settled(url)
    after = await _usage_once_closed(pid, before)
    seconds = time.monotonic() - begin
    wrong = [outcome for outcome in outcomes if not _as_it_should(outcome)]
    faults += [f"{outcome.request.kind}: status {outcome.status}, {outcome.request.body}"[:300] for outcome in wrong]
    if after.resident > before.resident * (1 + GROWTH):
        faults.append(f"resident memory has grown from {before.resident} to {after.resident} bytes")
    faults += [
        f"process {process} has {files} open files, and had {before.files.get(process)}"
        for process, files in after.opened_since(before).items()
    ]
    answered = [outcome for outcome in outcomes if outcome.token_ids]
    sample = random.Random(seed).sample(answered, min(compare, len(answered)))
    alone = await send_all(url, [outcome.request for outcome in sample], 1)
    faults += [
        f"{together.request.kind}: {list(together.token_ids)} together, {list(apart.token_ids)} alone"
        for together, apart in zip(sample, alone, strict=True)
        if together.token_ids != apart.token_ids
    ]
    ended = Counter(outcome.request.kind for outcome in outcomes if outcome not in wrong)
    return Report(seconds, ended, before, after, len(sample), faults)


def _as_it_should(outcome: Outcome) -> bool:
    match outcome.request.kind:
        case "refused":
            return 400 <= outcome.status < 500
        case "given up":
            return outcome.status == 200
    return outcome.status == 200 and bool(outcome.token_ids)


async def send_all(url: str, requests: Sequence[Request], concurrency: int) -> list[Outcome]:
    """Outcomes in the order of the requests, of which ``concurrency`` are open at any time."""
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(request: Request) -> Outcome:
            async with gate:
                return await _send(client, request)

        return list(await asyncio.gather(*map(one, requests)))


async def _send(client: httpx.AsyncClient, request: Request) -> Outcome:
    if request.chunks:
        async with client.stream("POST", "/v1/completions", json=request.body) as response:
            lines = response.aiter_lines()
            for _ in range(request.chunks):
                await anext(lines, None)
            return Outcome(request, response.status_code)
    response = await client.post("/v1/completions", json=request.body)
    if response.status_code != 200:
        return Outcome(request, response.status_code)
    return Outcome(request, 200, tuple(response.json()["choices"][0]["token_ids"]))


async def _settled(url: str) -> list[str]:
    """Wait until nothing runs, waits or holds KV blocks; what still does after a while."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + SETTLE_SECONDS
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            text = (await client.get("/metrics")).text
            busy = [line for line in text.splitlines() if line.startswith(names) and not line.endswith(" 0.0")]
            if not busy or time.monotonic() > deadline:
                return busy
            await asyncio.sleep(0.2)


async def _usage_once_closed(pid: int, before: Usage) -> Usage:
    """What a process holds when its sockets to clients that have gone are closed, or still holds after a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = usage(pid)
        if not found.opened_since(before) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)


def usage(pid: int) -> Usage:
    """What a process and its descendants hold now."""
    server = psutil.Process(pid)
    processes = [server, *server.children(recursive=True)]
    return Usage(sum(p.memory_info().rss for p in processes), {p.pid: p.num_fds() for p in processes})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--compare", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--route", choices=ROUTES, action="append")
    args = parser.parse_args()
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    failed = False
    for route in args.route or ROUTES:
        environment = {"VLLM_NEURON_BACKEND": route}
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(str(args.model), SERVER, environment, Path(folder) / "serve.log") as server,
        ):
            server.wait_for_answer()
            asked = args.requests, args.concurrency, args.compare, args.seed
            report = asyncio.run(soak(server.url, server.pid, MODEL_NAME, Limits(512, vocab_size), *asked))
        print(f"{route}: {report}", *report.faults[:20], sep="\n  ", flush=True)
        failed |= bool(report.faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
