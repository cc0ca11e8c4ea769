"""`vllm-neuron advise`: bucket lists for a traffic sample."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import NamedTuple

import httpx
from rich.console import Console
from rich.markup import escape

from vllm_neuron.advisor.advice import SEQS_OPTION, TOKENS_OPTION, Advice, additional_config, advise
from vllm_neuron.advisor.traffic import (
    Traffic,
    TrafficError,
    from_lengths,
    from_log,
    from_metrics,
    simulate_decoding,
    split_prompts,
)
from vllm_neuron.cli.errors import CommandError
from vllm_neuron.cli.tables import new_table
from vllm_neuron.config.buckets import SMALLEST_TOKEN_BUCKET
from vllm_neuron.reporting import page
from vllm_neuron.reporting.svg import line_chart

BAR = 40


class Limits(NamedTuple):
    """What the lists must keep to, and how they are weighed; None is found out from the sample.

    Attributes:
        max_num_batched_tokens: largest prefill step.
        max_num_seqs: largest decode step.
        most: buckets of the longest list.
        gain: a bucket more must save at least this share of all rows.
        multiple: token buckets are multiples of this.
        contexts: context buckets that each decode batch is compiled for.
    """

    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    most: int
    gain: float
    multiple: int
    contexts: int


def read(log: Path | None, metrics: str | None, lengths: Path | None) -> Traffic:
    """The sample.

    Raises:
        CommandError: not exactly one source is named, or it does not have what is needed.
    """
    if sum(source is not None for source in (log, metrics, lengths)) != 1:
        raise CommandError("Name the traffic in one way: --from-log FILE, --from-metrics FILE|URL or --lengths FILE.")
    try:
        if log is not None:
            return from_log(log)
        if metrics is not None:
            return from_metrics(_text_of(metrics), metrics)
        assert lengths is not None
        return from_lengths(lengths)
    except TrafficError as error:
        raise CommandError(str(error)) from error


def _text_of(source: str) -> str:
    if not source.startswith(("http://", "https://")):
        return Path(source).read_text()
    try:
        return httpx.get(source, timeout=30, follow_redirects=True).raise_for_status().text
    except httpx.HTTPError as error:
        raise CommandError(f"--from-metrics={source}: {error!r}. Name the server's /metrics, or a file.") from error


def run(traffic: Traffic, limits: Limits) -> list[Advice]:
    """Advice for each option that the sample says something of.

    Raises:
        CommandError: a step of the sample is larger than the limit that was given.
    """
    advices = []
    try:
        tokens = _token_steps(traffic, limits)
        if tokens:
            largest = limits.max_num_batched_tokens or _round_up(max(tokens), limits.multiple)
            advices.append(advise(TOKENS_OPTION, tokens, largest, limits.most, limits.gain, limits.multiple))
        decodes = dict(traffic.decode_steps)
        if not decodes and traffic.outputs and limits.max_num_seqs:
            decodes = simulate_decoding((output for _, output in traffic.outputs), limits.max_num_seqs)
        if decodes:
            largest = limits.max_num_seqs or max(decodes)
            advices.append(advise(SEQS_OPTION, decodes, largest, limits.most, limits.gain, contexts=limits.contexts))
    except ValueError as error:
        raise CommandError(f"{error}: raise --max-num-batched-tokens or --max-num-seqs.") from error
    return advices


def _token_steps(traffic: Traffic, limits: Limits) -> dict[int, float]:
    if traffic.prefill_steps:
        return dict(traffic.prefill_steps)
    if not traffic.prompts:
        return {}
    return split_prompts(traffic.prompts, limits.max_num_batched_tokens or max(traffic.prompts))


def _round_up(size: int, multiple: int) -> int:
    return max(SMALLEST_TOKEN_BUCKET, ceil(size / multiple) * multiple)


def as_json(advices: Sequence[Advice]) -> str:
    """All choices, and the proposal as it goes into --additional-config."""
    options = {advice.option: _document(advice) for advice in advices}
    return json.dumps({"options": options, "additional_config": json.loads(additional_config(advices))}, indent=2)


def _document(advice: Advice) -> dict[str, object]:
    choices = [
        {"name": c.name, "graphs": c.graphs, "waste": c.partition.waste} | asdict(c.partition) for c in advice.choices
    ]
    return {"steps": advice.steps, "choices": choices, "proposed": list(advice.proposed.partition.buckets)}


def _rows(advice: Advice) -> list[list[str]]:
    return [
        [
            choice.name + (" (proposed)" if choice is advice.proposed else ""),
            str(choice.graphs),
            f"{choice.partition.waste:.1%}",
            ", ".join(map(str, choice.partition.buckets)),
        ]
        for choice in advice.choices
    ]


COLUMNS = ("choice", "graphs", "padding", "buckets")


def show(advices: Sequence[Advice], console: Console) -> None:
    """Print a table and a plot of padding per option, then the proposal."""
    for advice in advices:
        console.print(f"{advice.option}, {advice.steps:g} steps; padding as a share of all rows")
        table = new_table(*COLUMNS, "", numbers=("graphs", "padding"))
        for row, choice in zip(_rows(advice), advice.choices, strict=True):
            table.add_row(*row, "█" * round(BAR * choice.partition.waste))
        console.print(table)
    console.print(f"--additional-config '{escape(additional_config(advices))}'")


def as_html(advices: Sequence[Advice]) -> str:
    """The same as one HTML file with a chart of padding against graphs per option."""
    parts = []
    for advice in advices:
        best = [(c.graphs, 100 * c.partition.waste) for c in advice.choices if c.name.startswith("best")]
        others = {
            c.name: [(c.graphs, 100 * c.partition.waste)] for c in advice.choices if not c.name.startswith("best")
        }
        chart = line_chart(advice.option, "graphs", "padding, % of all rows", {"best lists": best, **others})
        parts += [page.heading(f"{advice.option}, {advice.steps:g} steps"), chart, page.table(COLUMNS, _rows(advice))]
    proposal = page.code(f"--additional-config '{additional_config(advices)}'")
    return page.page("Bucket advice", *parts, page.heading("Proposal"), proposal)
