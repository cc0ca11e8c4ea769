"""Both sides in alternating rounds, medians with their spread, and the verdict."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from vllm_neuron.comparison.divergence import Divergence, divergences
from vllm_neuron.comparison.measure import Round, Side, measure
from vllm_neuron.comparison.workload import Workload

SLOWER_IF_MORE = ("ttft_p50_ms", "itl_p50_ms")
SLOWER_IF_LESS = ("output_tokens_per_second",)
MEMORY = "peak_memory_gib"


@dataclass(frozen=True)
class Spread:
    """A figure over all rounds."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class Thresholds:
    """What the candidate must reach.

    Attributes:
        agreement: least share of prompts with equal greedy tokens.
        near_tie: a divergence between tokens whose scores are no further apart than this on either side counts as
            equal.
        slowdown: how many times slower than the baseline it may be, in each of the medians of time to first token,
            inter-token latency and throughput; None for any.
        memory: how many times the baseline's peak memory it may take; None for any.
    """

    agreement: float = 1.0
    near_tie: float = 0.0
    slowdown: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Measured:
    """All rounds of one side."""

    side: Side
    rounds: tuple[Round, ...]

    def spread(self, figure: str) -> Spread | None:
        """A figure over the rounds; None where no round has it."""
        values = tuple(float(one.figures[figure]) for one in self.rounds if figure in one.figures)
        return Spread(median(values), min(values), max(values), values) if values else None


@dataclass(frozen=True)
class Comparison:
    """Everything that was measured.

    Attributes:
        baseline, candidate: the two sides.
        divergences: of greedy answers, in the order of prompts.
        steady: per side, whether its greedy answers were the same in all rounds.
        accuracy: per side, the outcome of `vllm-neuron validate` as JSON has it; empty where it was left out.
        failures: thresholds that were not reached, in sentences.
    """

    baseline: Measured
    candidate: Measured
    divergences: tuple[Divergence, ...]
    steady: tuple[bool, bool]
    accuracy: tuple[Mapping[str, Any], ...]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def figures(self) -> list[str]:
        """Names of all figures, in the order in which they were measured."""
        return list(dict.fromkeys(name for side in (self.baseline, self.candidate) for name in side.rounds[0].figures))


def run_rounds(
    sides: tuple[Side, Side],
    model: str,
    workload: Workload,
    rounds: int,
    cold: bool,
    logs: Path,
    report: Callable[[str], None],
) -> tuple[Measured, Measured]:
    """Measure both sides in turn, A B A B, so that what changes on the machine meanwhile meets both.

    Args:
        sides: baseline and candidate.
        model: folder or name.
        workload: what is asked.
        rounds: of each side.
        cold: start cold first, in an empty cache.
        logs: folder for the servers' output.
        report: is told what is being done.

    Raises:
        ServerFailedError, LoadError, ServerError: as `measure` does.
    """
    found: list[list[Round]] = [[], []]
    for number in range(rounds):
        for index, side in enumerate(sides):
            folder = logs / f"{number + 1}-{side.name}"
            folder.mkdir(parents=True, exist_ok=True)

            def tell(what: str, number: int = number, side: Side = side) -> None:
                report(f"round {number + 1} of {rounds}, {side.name}: {what}")

            with TemporaryDirectory() if cold else nullcontext() as caches:
                place = None if caches is None else Path(caches)
                found[index].append(measure(side, model, workload, place, folder, tell))
    return Measured(sides[0], tuple(found[0])), Measured(sides[1], tuple(found[1]))


def compare(
    baseline: Measured, candidate: Measured, accuracy: Sequence[Mapping[str, Any]], thresholds: Thresholds
) -> Comparison:
    """Set the two sides side by side, and judge the candidate."""
    answers = [side.rounds[0].answers for side in (baseline, candidate)]
    found = divergences(*answers)
    failures = [*_disagreements(found, len(answers[0]), thresholds), *_slow(baseline, candidate, thresholds)]
    for side, outcome in zip((baseline, candidate), accuracy, strict=False):
        if not outcome["passed"]:
            failures.append(f"{side.side.name}: vllm-neuron validate found more error than rounding explains")
    first, second = (
        all(_tokens(one) == _tokens(side.rounds[0]) for one in side.rounds) for side in (baseline, candidate)
    )
    return Comparison(baseline, candidate, tuple(found), (first, second), tuple(accuracy), tuple(failures))


def _tokens(one: Round) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in one.answers]


def _disagreements(found: Sequence[Divergence], prompts: int, thresholds: Thresholds) -> list[str]:
    # A gap that is unknown is no near tie.
    real = [one for one in found if not one.gap <= thresholds.near_tie]
    share = 1 - len(real) / prompts if prompts else 1.0
    if share >= thresholds.agreement:
        return []
    first = real[0]
    return [
        f"greedy tokens agree on {share:.0%} of {prompts} prompts, {thresholds.agreement:.0%} are required; first "
        f"difference in prompt {first.prompt} at token {first.position}: {first.tokens[0]} and {first.tokens[1]}, "
        f"scored {_pair(first.baseline)} by the baseline and {_pair(first.candidate)} by the candidate"
    ]


def _pair(scores: tuple[float, float]) -> str:
    return " and ".join("unknown" if score != score else f"{score:.4f}" for score in scores)


def _slow(baseline: Measured, candidate: Measured, thresholds: Thresholds) -> list[str]:
    limits = [(figure, thresholds.slowdown, False) for figure in SLOWER_IF_MORE]
    limits += [(figure, thresholds.slowdown, True) for figure in SLOWER_IF_LESS]
    limits += [(MEMORY, thresholds.memory, False)]
    failures = []
    for figure, limit, less_is_worse in limits:
        before, after = baseline.spread(figure), candidate.spread(figure)
        if limit is None or before is None or after is None:
            continue
        factor = before.median / after.median if less_is_worse else after.median / before.median
        if factor > limit:
            failures.append(
                f"{figure}: {after.median:.4g}, {before.median:.4g} of the baseline: {factor:.2f} times worse; "
                f"{limit:g} is allowed"
            )
    return failures
