"""One round of one side: start cold, start warm, compare, time, and read the counters."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_neuron.accuracy.servers import OpenAIServer, ServerError
from vllm_neuron.comparison.divergence import Answer
from vllm_neuron.comparison.load import Timings, stream_all
from vllm_neuron.comparison.server import Server, serving
from vllm_neuron.comparison.workload import Workload

TOP = 5
"""Scores that are asked for at each position."""
_SIZE = re.compile(r"(?:prefill_t|decode_b)(\d+)_")


@dataclass(frozen=True)
class Side:
    """What is compared.

    Attributes:
        name: in reports.
        route: value of VLLM_NEURON_BACKEND.
        flags: of `vllm serve`.
    """

    name: str
    route: str
    flags: tuple[str, ...]

    def environment(self, caches: Path | None) -> dict[str, str]:
        """Variables of its processes; with `caches`, every cache that a start could use lies there."""
        variables = {"VLLM_NEURON_BACKEND": self.route}
        if caches is not None:
            variables |= {
                "VLLM_CACHE_ROOT": str(caches / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
                "NEURON_COMPILED_ARTIFACTS": "",
                "NEURON_LIBTORCH_REMOTE_CACHE": "",
            }
        return variables


@dataclass(frozen=True)
class Bucket:
    """What a graph has run while requests were timed.

    Attributes:
        steps: executions.
        live: rows that were tokens or requests.
        rows: rows in all.
    """

    steps: int
    live: int
    rows: int

    @property
    def waste(self) -> float:
        """Padding, as a share of all rows."""
        return 1 - self.live / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class Round:
    """What one round of one side has measured.

    Attributes:
        figures: by name; seconds, milliseconds, tokens per second, GiB or counts, as the name says.
        buckets: by graph.
        answers: greedy, one per prompt.
        timings: of the timed requests.
    """

    figures: Mapping[str, float]
    buckets: Mapping[str, Bucket]
    answers: tuple[Answer, ...]
    timings: Timings


def measure(
    side: Side, model: str, workload: Workload, caches: Path | None, logs: Path, report: Callable[[str], None]
) -> Round:
    """Run one round.

    Args:
        side: which.
        model: folder or name.
        workload: what is asked.
        caches: an empty folder to start cold in, and then warm; None starts once, on the caches of this machine.
        logs: folder for the servers' output.
        report: is told what is being done.

    Raises:
        ServerFailedError: a server does not start.
        LoadError: a timed request failed.
        ServerError: a request for greedy tokens failed.
    """
    figures: dict[str, float] = {}
    environment = side.environment(caches)
    if caches is not None:
        report("cold start")
        with serving(model, side.flags, environment, logs / "cold.log") as server:
            figures["cold_start_seconds"] = server.wait_for_answer()
            figures["cold_compiles"] = server.graph_statistics()["compiled"]
    report("warm start")
    with serving(model, side.flags, environment, logs / "warm.log") as server:
        figures["warm_start_seconds"] = server.wait_for_answer()
        figures["warm_compiles"] = server.graph_statistics()["compiled"]
        report("greedy tokens")
        answers = greedy_answers(server, workload.prompts, workload.greedy_tokens)
        report("timed requests")
        before = buckets_of(server)
        timings = stream_all(server.url, workload.timed_prompts(), workload.output_tokens, workload.concurrency)
        buckets = difference(buckets_of(server), before)
        figures |= timings.figures()
        figures["compiles_after_warmup"] = server.graph_statistics()["compiles_after_warmup"]
        figures["peak_memory_gib"] = server.peak_memory_gib()
    return Round(figures, buckets, answers, timings)


def greedy_answers(server: Server, prompts: Sequence[str], tokens: int) -> tuple[Answer, ...]:
    """Greedy answers, one request at a time, so that each is computed in the same batch on either side.

    Raises:
        ServerError: the server does not answer, or tells no token ids.
    """
    client = OpenAIServer(server.url)
    asked = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    answers = []
    for prompt in prompts:
        try:
            choice = client.complete(prompt, logprobs=TOP, **asked)
        except ServerError as error:
            # Graphs that return nothing but the most likely token refuse logprobs, by name.
            if "logprobs" not in str(error):
                raise
            choice = client.complete(prompt, **asked)
        rows = (choice.get("logprobs") or {}).get("top_logprobs") or []
        scores = tuple({int(name.removeprefix("token_id:")): float(v) for name, v in row.items()} for row in rows)
        answers.append(Answer(tuple(choice["token_ids"]), scores))
    client.close()
    return tuple(answers)


def buckets_of(server: Server) -> dict[str, Bucket]:
    """Counters of every prefill and decode graph so far."""
    statistics = server.graph_statistics()
    live = statistics["live_rows"]
    return {
        name: Bucket(steps, live.get(name, 0), steps * int(size[1]))
        for name, steps in statistics["executions"].items()
        if (size := _SIZE.match(name)) is not None
    }


def difference(after: Mapping[str, Bucket], before: Mapping[str, Bucket]) -> dict[str, Bucket]:
    """What each graph ran between two readings, of graphs that ran at all."""
    none = Bucket(0, 0, 0)
    found = {}
    for name, bucket in sorted(after.items()):
        past = before.get(name, none)
        if bucket.steps > past.steps:
            found[name] = Bucket(bucket.steps - past.steps, bucket.live - past.live, bucket.rows - past.rows)
    return found
