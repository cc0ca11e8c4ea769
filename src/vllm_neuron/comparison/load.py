"""Streams requests at a server and notes when each token arrives."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx

from vllm_neuron.comparison.server import MODEL_NAME

TIMEOUT = 3600.0


class LoadError(RuntimeError):
    """A request was not answered in full; the text has the answer."""


@dataclass(frozen=True)
class Timings:
    """When tokens arrived.

    Attributes:
        first: per request, seconds to the first token.
        gaps: seconds between neighbouring tokens, of all requests.
        seconds: from the first request to the last token.
        tokens: that were generated.
        prompt_tokens: that were computed before them.
    """

    first: tuple[float, ...]
    gaps: tuple[float, ...]
    seconds: float
    tokens: int
    prompt_tokens: int

    def figures(self) -> dict[str, float]:
        """Percentiles in milliseconds, and tokens per second."""
        found = {f"ttft_p{p}_ms": 1e3 * percentile(self.first, p) for p in (50, 95, 99)}
        if self.gaps:
            found |= {f"itl_p{p}_ms": 1e3 * percentile(self.gaps, p) for p in (50, 95, 99)}
        found["output_tokens_per_second"] = self.tokens / self.seconds
        found["total_tokens_per_second"] = (self.tokens + self.prompt_tokens) / self.seconds
        return found


def percentile(values: Iterable[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed, between neighbours by proportion; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def stream_all(url: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> Timings:
    """Send all prompts, at most `concurrency` at once, and read their streams.

    Raises:
        LoadError: a request failed, or its stream ended early.
    """
    return asyncio.run(_stream_all(url, prompts, output_tokens, concurrency))


async def _stream_all(url: str, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int) -> Timings:
    free = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:

        async def one(prompt: Sequence[int]) -> tuple[float, list[float]]:
            async with free:
                begin = time.perf_counter()
                return begin, await _arrivals(client, prompt, output_tokens)

        begin = time.perf_counter()
        arrivals = await asyncio.gather(*map(one, prompts))
        seconds = time.perf_counter() - begin
    return Timings(
        first=tuple(times[0] - sent for sent, times in arrivals),
        gaps=tuple(late - early for _, times in arrivals for early, late in pairwise(times)),
        seconds=seconds,
        tokens=sum(len(times) for _, times in arrivals),
        prompt_tokens=sum(map(len, prompts)),
    )


async def _arrivals(client: httpx.AsyncClient, prompt: Sequence[int], output_tokens: int) -> list[float]:
    """When each token of one answer arrived. A server sends an event for each."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    times = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise LoadError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and '"choices"' in line:
                times.append(time.perf_counter())
    if not times:
        raise LoadError("the stream of an answer has ended without a token")
    return times
