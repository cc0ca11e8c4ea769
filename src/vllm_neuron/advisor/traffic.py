"""A sample of traffic as step sizes: how many tokens prefill steps have, and how many requests decode steps.

Three sources: lengths of requests, a server's log, and its Prometheus metrics.
"""

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class TrafficError(ValueError):
    """A file does not have what is needed; the text says what, and how to get it."""


@dataclass(frozen=True)
class Traffic:
    """A sample.

    Attributes:
        prompts: lengths of prompts in tokens, to how many there are.
        prefill_steps: sizes of prefill steps where the source knows them, to how many there are; else empty.
        decode_steps: numbers of requests of decode steps, to how many there are; may be empty.
        outputs: (prompt, output) lengths of requests in order, where the source knows both.
    """

    prompts: Mapping[int, float] = field(default_factory=dict)
    prefill_steps: Mapping[int, float] = field(default_factory=dict)
    decode_steps: Mapping[int, float] = field(default_factory=dict)
    outputs: Sequence[tuple[int, int]] = ()


def split_prompts(prompts: Mapping[int, float], step: int) -> dict[int, float]:
    """Sizes of the prefill steps of prompts of which at most `step` tokens are computed at a time."""
    sizes: dict[int, float] = defaultdict(float)
    for length, count in prompts.items():
        whole, rest = divmod(length, step)
        if whole:
            sizes[step] += count * whole
        if rest:
            sizes[rest] += count
    return dict(sizes)


def simulate_decoding(outputs: Iterable[int], concurrency: int) -> dict[int, float]:
    """Numbers of requests of decode steps when `concurrency` clients each send one request after the other.

    The first token of a request comes from its prefill. Prefills take no time: this is about batch sizes, not seconds.
    """
    sizes: dict[int, float] = defaultdict(float)
    running: list[int] = []
    now, waiting = 0, iter(outputs)
    exhausted = False
    while True:
        while len(running) < concurrency and not exhausted:
            length = next(waiting, None)
            if length is None:
                exhausted = True
            elif length > 1:
                heapq.heappush(running, now + length - 1)
        if not running:
            return dict(sizes)
        # Nothing changes before the next request ends.
        end = running[0]
        sizes[len(running)] += end - now
        now = end
        while running and running[0] == now:
            heapq.heappop(running)


def from_lengths(path: Path) -> Traffic:
    """Lengths of requests: lines of "prompt [output]", JSON lines, or the result of `vllm bench serve --save-detailed`.

    JSON lines are objects with prompt_tokens and perhaps completion_tokens, as in the usage of an OpenAI answer.

    Raises:
        TrafficError: the file is none of these.
    """
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise TrafficError(f"--lengths={path}: the file is empty")
    try:
        pairs = _bench_result(text) if '"input_lens"' in text else [_length_line(line) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise TrafficError(
            f'--lengths={path}: expected "prompt [output]" or {{"prompt_tokens": ..., "completion_tokens": ...}} '
            f"on each line, or the JSON of vllm bench serve --save-result --save-detailed: {error!r}"
        ) from error
    if any(prompt < 1 or output < 0 for prompt, output in pairs):
        raise TrafficError(f"--lengths={path}: lengths must be at least 1 token")
    return Traffic(prompts=Counter(prompt for prompt, _ in pairs), outputs=[pair for pair in pairs if pair[1]])


def _bench_result(text: str) -> list[tuple[int, int]]:
    document = json.loads(text)
    return [(int(a), int(b)) for a, b in zip(document["input_lens"], document["output_lens"], strict=True)]


def _length_line(line: str) -> tuple[int, int]:
    if line.lstrip().startswith("{"):
        document: dict[str, Any] = json.loads(line)
        document = document.get("usage", document)
        return int(document["prompt_tokens"]), int(document.get("completion_tokens") or 0)
    numbers = [int(part) for part in re.split(r"[\s,;]+", line.strip())]
    if len(numbers) > 2:
        raise ValueError(f"{len(numbers)} numbers on a line")
    return numbers[0], numbers[1] if len(numbers) == 2 else 0


_PROMPT = re.compile(r"Request (\S+) details: .*prompt_token_ids: \[([\d, ]*)\]")
_RESPONSE = re.compile(
    r"Generated response (\S+?)(?: \(streaming complete\))?: output: .*output_token_ids: \[([\d, ]*)\]"
)
_RUNNING = re.compile(r"Running: (\d+) reqs")


def from_log(path: Path) -> Traffic:
    """What a log of `vllm serve` tells.

    Every such log has the number of running requests now and then. Lengths of prompts are in logs of servers with
    --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG, lengths of outputs with --enable-log-outputs.

    Raises:
        TrafficError: neither is there.
    """
    text = path.read_text(errors="replace")
    prompts = {name: _count(ids) for name, ids in _PROMPT.findall(text)}
    outputs = {name: _count(ids) for name, ids in _RESPONSE.findall(text)}
    running = Counter(int(count) for count in _RUNNING.findall(text) if int(count))
    if not prompts and not running:
        raise TrafficError(
            f"--from-log={path}: no request and no statistics in it. Serve with VLLM_LOGGING_LEVEL=DEBUG, "
            "--enable-log-requests, and without --disable-log-stats."
        )
    pairs = [(length, outputs[name]) for name, length in prompts.items() if outputs.get(name)]
    return Traffic(
        prompts=Counter(length for length in prompts.values() if length), decode_steps=running, outputs=pairs
    )


def _count(ids: str) -> int:
    return len(ids.split(",")) if ids.strip() else 0


TOKENS_METRIC = "vllm_neuron:num_batched_tokens_padding"
SEQS_METRIC = "vllm_neuron:num_seqs_padding"
PROMPTS_METRIC = "vllm:request_prompt_tokens"
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)_bucket\{(?P<labels>.*)\}\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def from_metrics(text: str, source: str) -> Traffic:
    """What a server's /metrics tell, as text.

    A padding histogram says how many steps of a bucket had how much padding, within the edges of the histogram. Each
    step counts with the least padding of its range, so that what is proposed holds it. Where the plugin's histograms
    are missing, vLLM's own histogram of prompt lengths is read: each prompt counts as long as its range allows.

    Args:
        text: in the Prometheus text format.
        source: names it in errors.

    Raises:
        TrafficError: there is none of these histograms.
    """
    histograms = _histograms(text)
    prefill = _steps(histograms.get(TOKENS_METRIC, {}), r"t(\d+)")
    decode = _steps(histograms.get(SEQS_METRIC, {}), r"b(\d+)")
    prompts: dict[int, float] = defaultdict(float)
    for cumulative in histograms.get(PROMPTS_METRIC, {}).values():
        for _, upper, count in _ranges(cumulative):
            prompts[int(upper)] += count
    if not (prefill or decode or prompts):
        raise TrafficError(
            f"--from-metrics={source}: none of {TOKENS_METRIC}, {SEQS_METRIC} and {PROMPTS_METRIC} counts anything. "
            "Read the /metrics of a server that has answered requests."
        )
    return Traffic(prompts=prompts, prefill_steps=prefill, decode_steps=decode)


Histogram = dict[float, float]
"""Upper edge of a range, to the count of everything up to it."""


def _histograms(text: str) -> dict[str, dict[str, Histogram]]:
    """By metric and by bucket_name (all ranks and engines of it together)."""
    found: dict[str, dict[str, Histogram]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None or sample["name"] not in (TOKENS_METRIC, SEQS_METRIC, PROMPTS_METRIC):
            continue
        labels = dict(_LABEL.findall(sample["labels"]))
        histogram = found.setdefault(sample["name"], {}).setdefault(labels.get("bucket_name", ""), {})
        edge = float(labels["le"])
        histogram[edge] = histogram.get(edge, 0.0) + float(sample["value"])
    return found


def _ranges(cumulative: Histogram) -> Iterable[tuple[float, float, float]]:
    """(lower edge, upper edge, count) of the ranges (lower, upper] that count anything. The first begins at -1, so that
    it holds 0; the last ends where it begins."""
    lower, before = -1.0, 0.0
    for edge in sorted(cumulative):
        count = cumulative[edge] - before
        if count > 0:
            yield lower, edge if edge != float("inf") else lower, count
        before = cumulative[edge]
        lower = edge if edge != float("inf") else lower


def _steps(histograms: Mapping[str, Histogram], size: str) -> dict[int, float]:
    """Live sizes of steps: a bucket's size less the padding."""
    sizes: dict[int, float] = defaultdict(float)
    for name, cumulative in histograms.items():
        named = re.search(size, name) or re.search(r"(\d+)", name)
        if named is None:
            continue
        bucket = int(named[1])
        for lower, _, count in _ranges(cumulative):
            # A range is (lower, upper], of whole numbers.
            sizes[max(1, bucket - int(lower) - 1)] += count
    return dict(sizes)
