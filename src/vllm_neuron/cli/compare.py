"""`vllm-neuron compare`: one workload through two compile routes, or two sets of flags, and what came of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_neuron.accuracy.servers import ServerError
from vllm_neuron.cli.documents import to_json
from vllm_neuron.cli.errors import CommandError
from vllm_neuron.cli.tables import new_table
from vllm_neuron.comparison.compare import Comparison, Measured, Spread, Thresholds, compare, run_rounds
from vllm_neuron.comparison.load import LoadError, percentile
from vllm_neuron.comparison.measure import Side
from vllm_neuron.comparison.server import ServerFailedError
from vllm_neuron.comparison.workload import Workload
from vllm_neuron.reporting import page
from vllm_neuron.reporting.svg import bar_chart, line_chart

SAMPLING_OPTION = "on_device_sampling_config"
LOGITS = ("--logprobs-mode", "raw_logits")
"""Makes servers that sample on the host tell logits where they would tell log probabilities."""
_VALIDATE = "from vllm_neuron.cli.main import main; main()"


def sides_of(routes: tuple[str, str], flags: Sequence[str], own_flags: tuple[Sequence[str], ...]) -> tuple[Side, Side]:
    """Baseline and candidate. Routes that are the same are told apart by number."""
    shown = routes if routes[0] != routes[1] else (f"{routes[0]}-1", f"{routes[1]}-2")
    first, second = (
        Side(name, route, (*flags, *own, *_logits(flags, own)))
        for name, route, own in zip(shown, routes, own_flags, strict=True)
    )
    return first, second


def _logits(flags: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    text = " ".join((*flags, *own))
    return () if SAMPLING_OPTION in text or "--logprobs-mode" in text else LOGITS


def run(
    model: str,
    sides: tuple[Side, Side],
    workload: Workload,
    rounds: int,
    cold: bool,
    accuracy: bool,
    thresholds: Thresholds,
    logs: Path | None,
    report: Callable[[str], None],
) -> Comparison:
    """Measure and compare.

    Args:
        model: folder or name.
        sides: baseline and candidate.
        workload: what both are asked.
        rounds: of each side.
        cold: start cold in each round.
        accuracy: run `vllm-neuron validate` against transformers on each side.
        thresholds: for the verdict.
        logs: folder to keep the servers' output in; None keeps none.
        report: is told what is being done.

    Raises:
        CommandError: a server does not start or does not answer.
    """
    try:
        with TemporaryDirectory() as scratch:
            measured = run_rounds(sides, model, workload, rounds, cold, logs or Path(scratch), report)
    except (ServerFailedError, LoadError, ServerError) as error:
        raise CommandError(str(error)) from error
    outcomes = []
    for side in sides if accuracy else ():
        report(f"{side.name}: logits against transformers")
        outcomes.append(_validate(model, side))
    return compare(*measured, outcomes, thresholds)


def _validate(model: str, side: Side) -> dict[str, Any]:
    command = [sys.executable, "-c", _VALIDATE, "validate", model, *side.flags, "--against", "hf", "--json"]
    done = subprocess.run(command, env=os.environ | side.environment(None), capture_output=True, text=True)
    try:
        outcome: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise CommandError(
            f"vllm-neuron validate on {side.name} ended with {done.returncode}: {done.stderr[-2000:]}"
        ) from error
    return outcome


def as_json(found: Comparison) -> str:
    """Everything that was measured, as one JSON object. What is unknown is null."""
    document = {
        "passed": found.passed,
        "failures": found.failures,
        "divergences": [asdict(one) | {"gap": one.gap} for one in found.divergences],
        "sides": [
            {
                "name": side.side.name,
                "route": side.side.route,
                "flags": side.side.flags,
                "steady": steady,
                "figures": {name: asdict(s) for name in found.figures if (s := side.spread(name)) is not None},
                "buckets": {
                    name: asdict(bucket) | {"waste": bucket.waste} for name, bucket in side.rounds[0].buckets.items()
                },
                "answers": [answer.token_ids for answer in side.rounds[0].answers],
            }
            for side, steady in zip((found.baseline, found.candidate), found.steady, strict=True)
        ],
        "accuracy": found.accuracy,
    }
    return to_json(document)


def _figure_rows(found: Comparison) -> list[list[str]]:
    rows = []
    for name in found.figures:
        before, after = found.baseline.spread(name), found.candidate.spread(name)
        ratio = f"{after.median / before.median:.2f}" if before and after and before.median else "-"
        rows.append([name, _spread(before), _spread(after), ratio])
    return rows


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return f"{spread.median:.4g}"
    return f"{spread.median:.4g} ({spread.low:.4g} to {spread.high:.4g})"


def _bucket_rows(found: Comparison) -> list[list[str]]:
    return [
        [side.side.name, name, str(bucket.steps), str(bucket.live), str(bucket.rows), f"{bucket.waste:.1%}"]
        for side in (found.baseline, found.candidate)
        for name, bucket in side.rounds[0].buckets.items()
    ]


def _divergence_rows(found: Comparison) -> list[list[str]]:
    return [
        [
            str(one.prompt),
            str(one.position),
            f"{one.tokens[0]} / {one.tokens[1]}",
            *(
                " / ".join("-" if isnan(score) else f"{score:.4f}" for score in pair)
                for pair in (one.baseline, one.candidate)
            ),
            "-" if isnan(one.gap) else f"{one.gap:.4f}",
        ]
        for one in found.divergences
    ]


def _accuracy_rows(found: Comparison) -> list[list[str]]:
    rows = []
    for side, outcome in zip((found.baseline, found.candidate), found.accuracy, strict=False):
        model = outcome["model"]
        for who, errors in ((side.side.name, model["errors"]), (f"transformers, {model['dtype']}", model["noise"])):
            values = (errors[name] for name in ("rms", "p99", "max", "top1", "topk", "kl_mean"))
            # What was no number is null.
            rows.append([who, *("-" if value is None else f"{value:.4g}" for value in values)])
    return rows


BUCKETS = ("side", "graph", "steps", "live rows", "rows", "padding")
DIVERGENCES = ("prompt", "token", "token ids", "scores of the baseline", "scores of the candidate", "gap")
ACCURACY = ("logits of", "RMS error", "99th percentile", "largest", "top-1 equal", "top-k in common", "KL (nats)")


def _sections(found: Comparison) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    names = (found.baseline.side.name, found.candidate.side.name)
    return [
        ("Figures: median (lowest to highest)", ("figure", *names, "ratio"), _figure_rows(found)),
        ("Padding of the timed requests, first round", BUCKETS, _bucket_rows(found)),
        ("Greedy answers that differ, at their first difference", DIVERGENCES, _divergence_rows(found)),
        ("Logits against transformers, one precision up", ACCURACY, _accuracy_rows(found)),
    ]


def show(found: Comparison, console: Console) -> None:
    """Print the comparison for people; the last line says whether it passed."""
    for title, columns, rows in _sections(found):
        if not rows:
            continue
        console.print(title)
        table = new_table(*columns)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
    for remark in _remarks(found):
        console.print(escape(remark))
    for failure in found.failures:
        console.print(f"failed: {escape(failure)}")
    console.print("passed" if found.passed else "failed")


def _remarks(found: Comparison) -> list[str]:
    prompts = len(found.baseline.rounds[0].answers)
    remarks = [f"greedy tokens are equal on {prompts - len(found.divergences)} of {prompts} prompts"]
    for side, steady in zip((found.baseline, found.candidate), found.steady, strict=True):
        if not steady:
            remarks.append(f"{side.side.name} answers differently from round to round")
    return remarks


def as_html(found: Comparison, model: str) -> str:
    """The same as one HTML file with charts, which opens without a network."""
    parts = [page.verdict(found.passed, [*found.failures, *_remarks(found)])]
    sides = (found.baseline, found.candidate)
    for side in sides:
        flags = " ".join(side.side.flags)
        parts.append(
            page.paragraph(f"{side.side.name}: VLLM_NEURON_BACKEND={side.side.route} vllm serve {model} {flags}")
        )
    parts += _charts(sides)
    for title, columns, rows in _sections(found):
        if rows:
            parts += [page.heading(title), page.table(columns, rows)]
    if found.accuracy:
        parts += [page.heading("Logit error by position, first prompt"), _error_chart(found)]
    return page.page(f"{found.baseline.side.name} and {found.candidate.side.name} on {model}", *parts)


def _charts(sides: tuple[Measured, Measured]) -> list[str]:
    def bars(title: str, unit: str, figures: Sequence[str]) -> str:
        series = {side.side.name: [_whisker(side.spread(name)) for name in figures] for side in sides}
        return bar_chart(title, unit, figures, series)

    waits = {
        side.side.name: [(share, 1e3 * percentile(_gaps(side), share)) for share in range(0, 101, 2)] for side in sides
    }
    buckets = sorted({name for side in sides for name in side.rounds[0].buckets})
    padding = {
        side.side.name: [
            (100 * side.rounds[0].buckets[name].waste,) * 3 if name in side.rounds[0].buckets else None
            for name in buckets
        ]
        for side in sides
    }
    return [
        bars("Start", "seconds", ("cold_start_seconds", "warm_start_seconds")),
        bars("Throughput", "tokens per second", ("output_tokens_per_second", "total_tokens_per_second")),
        bars("Time to first token", "milliseconds", ("ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms")),
        bars("Inter-token latency", "milliseconds", ("itl_p50_ms", "itl_p95_ms", "itl_p99_ms")),
        line_chart("Inter-token latency, all rounds", "percentile", "milliseconds", waits),
        bars("Peak memory of the engine", "GiB", ("peak_memory_gib",)),
        bar_chart("Padding by graph", "% of rows", buckets, padding),
    ]


def _gaps(side: Measured) -> list[float]:
    return [gap for one in side.rounds for gap in one.timings.gaps]


def _whisker(spread: Spread | None) -> tuple[float, float, float] | None:
    return None if spread is None else (spread.median, spread.low, spread.high)


def _error_chart(found: Comparison) -> str:
    series = {}
    for side, outcome in zip((found.baseline, found.candidate), found.accuracy, strict=False):
        model = outcome["model"]
        series[side.side.name] = _known(model["error_by_position"])
        series[f"transformers, {model['dtype']}"] = _known(model["noise_by_position"])
    return line_chart("Relative RMS error of logits", "position", "error", series, logarithmic=True)


def _known(values: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(position, value) for position, value in enumerate(values) if value is not None]
