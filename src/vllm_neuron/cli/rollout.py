"""`vllm-neuron rollout`: writes a proxy's configuration, and judges whether the new server may have more traffic."""

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_neuron.cli.errors import CommandError, exiting_on_errors

if TYPE_CHECKING:
    from vllm_neuron.rollout.judgement import Finding, Judgement
    from vllm_neuron.rollout.measure import Measurement
    from vllm_neuron.rollout.proxy import Split

HOLD, ROLL_BACK = 3, 4
"""Exit codes besides 0, which is raise."""

LAST_LINES = 5
"""Of a validating command's output that are shown."""

app = typer.Typer(help="Move traffic from an old server to a new one, step by step.", no_args_is_help=True)

Config = Annotated[Path, typer.Argument(metavar="FILE", help="Configuration that `rollout write` has written.")]


@app.command()
def write(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Root of the old server, such as http://localhost:8000.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Root of the new server.")],
    percent: Annotated[int, typer.Option(metavar="N", help="Share of requests that NEW gets.")] = 1,
    port: Annotated[int, typer.Option(metavar="PORT", help="That the proxy listens on.")] = 8080,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where to.")] = Path("haproxy.cfg"),
) -> None:
    """Write a configuration of HAProxy that splits requests between two OpenAI servers.

    Neither server is asked anything. FILE is replaced only if it is one of ours.
    """
    from vllm_neuron.rollout.proxy import Split, SplitError

    with exiting_on_errors():
        if output.exists():
            _read(output)
        try:
            split = Split(old, new, percent, port)
        except SplitError as error:
            raise CommandError(str(error)) from error
        _write(output, split)
        typer.echo(f"{output}: {percent}% of the requests to port {port} go to {new}, the others to {old}")


@app.command()
def check(
    file: Config,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts of your own, one on each line, in place of the few here."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Of each answer.")] = 16,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often each prompt is asked.")] = 3,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="To wait for the next token.")] = 60.0,
    agreement: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="Greedy answers must be the same to this share.")
    ] = 0.8,
    latency_ratio: Annotated[
        float, typer.Option(metavar="X", help="NEW may take this many times as long as OLD.")
    ] = 1.2,
    rollback_ratio: Annotated[float, typer.Option(metavar="X", help="Beyond it the traffic goes back.")] = 2.0,
    ttft: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Limit of the time to first token, 95th percentile.")
    ] = None,
    itl: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Limit of the time between tokens, 95th percentile.")
    ] = None,
    validate: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run it with NEW's URL at its end; a non-zero exit code rolls back."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write the recommended share into FILE.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Check both servers, and recommend to raise, hold or roll back the share of the new one.

    Checked are health and model names, failed requests, greedy answers to the
    same prompts, time to first token and time between tokens. OPENAI_API_KEY is
    sent if it is set.

    The exit code is 0 for raise, 3 for hold, 4 for roll back, and 1 if FILE
    cannot be used.
    """
    from vllm_neuron.rollout.judgement import Thresholds, Verdict, judge
    from vllm_neuron.rollout.measure import PROMPTS, measure

    thresholds = Thresholds(agreement, latency_ratio, rollback_ratio, ttft, itl)
    with exiting_on_errors():
        split = _read(file)
        asked = _prompts(prompts) if prompts else PROMPTS
        key = os.environ.get("OPENAI_API_KEY", "")
        old, new = measure(
            (split.old, split.new), asked, max_tokens=max_tokens, rounds=rounds, timeout=timeout, api_key=key
        )
        others = [validated(validate, split.new)] if validate and not new.fault else []
        judgement = judge(old, new, split.percent, thresholds, others)
        if apply and judgement.percent != split.percent:
            _write(file, replace(split, percent=judgement.percent))
    if as_json:
        typer.echo(as_text(judgement, split, old, new))
    else:
        show(judgement, split)
    raise typer.Exit({Verdict.RAISE: 0, Verdict.HOLD: HOLD, Verdict.ROLL_BACK: ROLL_BACK}[judgement.verdict])


def validated(command: str, url: str) -> "Finding":
    """What a command of the user's says of a server, by its exit code.

    Raises:
        CommandError: the command cannot be started.
    """
    from vllm_neuron.rollout.judgement import Finding, Verdict

    try:
        done = subprocess.run([*shlex.split(command), url], capture_output=True, text=True, check=False)
    except (OSError, ValueError) as error:
        raise CommandError(f"--validate={command!r} cannot be run: {error}. Correct it or leave it out.") from error
    lines = (done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:]
    verdict = Verdict.ROLL_BACK if done.returncode else Verdict.RAISE
    return Finding(f"{command} (exit code {done.returncode})", verdict, "\n".join(lines) or "no output")


def show(judgement: "Judgement", split: "Split") -> None:
    """Print each check and the recommendation."""
    from rich.text import Text

    from vllm_neuron.cli.tables import new_table, result_console

    console = result_console()
    rows = new_table("check", "verdict", "found")
    for finding in judgement.findings:
        rows.add_row(*(Text(cell) for cell in (finding.check, finding.verdict.words, finding.text)))
    console.print(rows)
    typer.echo(f"recommendation: {recommendation(judgement, split)}")


def recommendation(judgement: "Judgement", split: "Split") -> str:
    """One line: what to do with the share of the new server."""
    if judgement.percent == split.percent:
        done = ": the old server can be retired" if judgement.verdict.words == "raise" else ""
        return f"{judgement.verdict.words}, at {split.percent}%{done}"
    return f"{judgement.verdict.words}, from {split.percent}% to {judgement.percent}%"


def as_text(judgement: "Judgement", split: "Split", old: "Measurement", new: "Measurement") -> str:
    """One JSON object with everything that was measured."""
    findings = [
        {"check": finding.check, "verdict": finding.verdict.words, "found": finding.text}
        for finding in judgement.findings
    ]
    result = {"recommendation": judgement.verdict.words, "from_percent": split.percent, "to_percent": judgement.percent}
    return json.dumps({**result, "findings": findings, "old": asdict(old), "new": asdict(new)}, indent=2)


def _prompts(path: Path) -> Sequence[str]:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise CommandError(f"--prompts={path} has no prompt: write one on each line.")
    return lines


def _read(path: Path) -> "Split":
    from vllm_neuron.rollout.proxy import SplitError, read_split

    try:
        return read_split(path.read_text())
    except SplitError as error:
        raise CommandError(f"{path}: {error}") from error


def _write(path: Path, split: "Split") -> None:
    """Replace a configuration, whole or not at all."""
    from vllm_neuron.rollout.proxy import haproxy_configuration

    text = haproxy_configuration(split)
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(text)
    draft.replace(path)
