"""Whether the new server may have more of the traffic. Pure: measurements in, a recommendation out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from statistics import fmean, quantiles

from vllm_neuron.rollout.measure import Measurement

STEPS = (0, 1, 5, 25, 50, 100)
"""Percentages on the way."""


class Verdict(IntEnum):
    """What a check means for the share of the new server; the worst one counts."""

    RAISE = 0
    HOLD = 1
    ROLL_BACK = 2

    @property
    def words(self) -> str:
        """As it is printed."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Thresholds:
    """What the new server must keep.

    Attributes:
        agreement: smallest mean share of the old server's greedy answers that the new one repeats from the start.
        latency_ratio: largest new / old, for the median and the 95th percentile of both latencies. Above it the share
            is held.
        rollback_ratio: the same, above which it is taken back.
        ttft: largest 95th percentile of the time to first token in seconds; None is any.
        itl: the same of the time between tokens.
        samples: fewest answers of each server to judge by.
    """

    agreement: float = 0.8
    latency_ratio: float = 1.2
    rollback_ratio: float = 2.0
    ttft: float | None = None
    itl: float | None = None
    samples: int = 8


@dataclass(frozen=True)
class Finding:
    """One check: its name, its verdict and what was found."""

    check: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Judgement:
    """All checks, the verdict that follows, and the percentage to go to."""

    findings: tuple[Finding, ...]
    verdict: Verdict
    percent: int


def judge(
    old: Measurement,
    new: Measurement,
    percent: int,
    thresholds: Thresholds,
    others: Sequence[Finding] = (),
) -> Judgement:
    """Compare two servers that were measured with the same prompts.

    Args:
        old, new: what was measured.
        percent: share of `new` today.
        thresholds: what to keep.
        others: findings from elsewhere that count too.
    """
    findings = (*_health(old, new), *others)
    if not (old.fault or new.fault):
        findings += (*_answers(old, new, thresholds), *_latency(old, new, thresholds))
    verdict = max(finding.verdict for finding in findings)
    above = (step for step in STEPS if step > percent)
    goal = {Verdict.RAISE: next(above, 100), Verdict.HOLD: percent, Verdict.ROLL_BACK: 0}[verdict]
    return Judgement(findings, verdict, goal)


def agreement(old: Measurement, new: Measurement) -> float:
    """Mean over the prompts of (length of the common beginning) / (length of the longer answer), in characters.

    Answers that part once usually differ from there on, so this falls with the first different token.
    """
    shared = old.answers.keys() & new.answers.keys()
    pairs = [(old.answers[index], new.answers[index]) for index in shared]
    return fmean(_common_beginning(*pair) / max(map(len, pair)) for pair in pairs) if pairs else 0.0


def _common_beginning(first: str, second: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _health(old: Measurement, new: Measurement) -> Iterator[Finding]:
    for name, server, verdict in (("old", old, Verdict.HOLD), ("new", new, Verdict.ROLL_BACK)):
        if server.fault:
            yield Finding(f"health of {name}", verdict, f"{server.url}: {server.fault}")
        else:
            yield Finding(f"health of {name}", Verdict.RAISE, f"{server.url} serves {server.model}")
    if old.model != new.model and not (old.fault or new.fault):
        text = f"{old.model!r} and {new.model!r}: give both the same --served-model-name, or requests fail on one"
        yield Finding("model name", Verdict.ROLL_BACK, text)


def _answers(old: Measurement, new: Measurement, thresholds: Thresholds) -> Iterator[Finding]:
    for name, server, verdict in (("old", old, Verdict.HOLD), ("new", new, Verdict.ROLL_BACK)):
        if server.failures:
            text = f"{len(server.failures)} requests failed; the first: {server.failures[0]}"
            yield Finding(f"requests to {name}", verdict, text)
    fewest = min(len(old.ttft), len(new.ttft))
    if fewest < thresholds.samples:
        yield Finding("samples", Verdict.HOLD, f"{fewest} answers to judge by, fewer than {thresholds.samples}")
    if old.answers and new.answers:
        share = agreement(old, new)
        verdict = Verdict.RAISE if share >= thresholds.agreement else Verdict.ROLL_BACK
        text = f"{share:.1%} of the greedy answers are the same (at least {thresholds.agreement:.1%})"
        yield Finding("accuracy", verdict, text)


def _latency(old: Measurement, new: Measurement, thresholds: Thresholds) -> Iterator[Finding]:
    for name, before, after, limit in (
        ("time to first token", old.ttft, new.ttft, thresholds.ttft),
        ("time between tokens", old.itl, new.itl, thresholds.itl),
    ):
        if len(before) < 2 or len(after) < 2:
            yield Finding(name, Verdict.HOLD, "not measured: too few answers, or answers of one token")
            continue
        for rank in (50, 95):
            yield _ratio(f"{name}, p{rank}", percentile(before, rank), percentile(after, rank), thresholds)
        if limit is not None:
            worst = percentile(after, 95)
            verdict = Verdict.RAISE if worst <= limit else Verdict.ROLL_BACK
            yield Finding(f"{name}, limit", verdict, f"p95 {_ms(worst)} (at most {_ms(limit)})")


def _ratio(name: str, before: float, after: float, thresholds: Thresholds) -> Finding:
    ratio = after / before if before else 1.0
    verdict = Verdict.RAISE
    if ratio > thresholds.rollback_ratio:
        verdict = Verdict.ROLL_BACK
    elif ratio > thresholds.latency_ratio:
        verdict = Verdict.HOLD
    return Finding(
        name, verdict, f"{_ms(before)} -> {_ms(after)}, x{ratio:.2f} (at most x{thresholds.latency_ratio:g})"
    )


def percentile(values: Sequence[float], rank: int) -> float:
    """The `rank`-th percentile of two values or more, between them where it falls there."""
    return quantiles(values, n=100, method="inclusive")[rank - 1]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
