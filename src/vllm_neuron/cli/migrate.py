"""`vllm-neuron migrate`: an old launch in, the new one out, and a table of what became of each setting."""

import difflib
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vllm_neuron.cli.errors import CommandError
from vllm_neuron.cli.tables import new_table
from vllm_neuron.migration import Launch, LaunchError, Migration, Verdict, migrate
from vllm_neuron.migration.arguments import as_words

NEEDS_A_PERSON = 3
"""Exit code."""

_COLOURS = {Verdict.DECIDE: "yellow", Verdict.UNSUPPORTED: "red", Verdict.DROPPED: "dim"}


def run(source: str, keep_tuning: bool, only_supported: bool) -> Migration:
    """Migrate a file, standard input ("-") or the text itself.

    Raises:
        CommandError: it cannot be read, or is no launch.
        OSError: the file cannot be read.
    """
    text, name = _read(source)
    try:
        return migrate(text, name, keep_tuning, only_supported, flag_faults)
    except LaunchError as error:
        raise CommandError(str(error)) from error


def _read(source: str) -> tuple[str, str]:
    """(text, name of its file or "")."""
    if source == "-":
        return sys.stdin.read(), ""
    if os.path.isfile(source):
        return Path(source).read_text(), source
    if source.strip() and not source.startswith("{") and len(source.split()) == 1:
        raise CommandError(f"{source}: no such file. Name a file, - for standard input, or quote a whole command.")
    return source, ""


def flag_faults(launch: Launch) -> list[str]:
    """What vLLM's own parser does not take of a launch. Values that are only known later are left out."""
    from vllm_neuron.plugin.arguments import ArgumentsError, cpu_mode, parse_arguments, quiet_vllm

    quiet_vllm()
    options = [option for option in launch.options.values() if option.known and option.value is not None]
    try:
        with cpu_mode():
            parse_arguments([word for option in options for word in as_words(option)])
    except ArgumentsError as error:
        return [" ".join(str(error).split())]
    return []


def as_json(migration: Migration) -> str:
    """The migration as one JSON object."""
    launches = [
        {
            "program": launch.new.program,
            "options": {name: _plain(option.value) for name, option in launch.new.options.items()},
            "environment": dict(launch.new.environment),
            "rows": [row.__dict__ for row in launch.rows],
            "unchecked": list(launch.unchecked),
        }
        for launch in migration.launches
    ]
    document = {
        "form": migration.form,
        "launches": launches,
        "new": migration.new,
        "needs_a_person": len(migration.open_rows),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, default=str)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def diff(migration: Migration) -> str:
    """What changes in the text, as a unified diff."""
    lines = difflib.unified_diff(
        migration.old.splitlines(keepends=True), migration.new.splitlines(keepends=True), "old", "new"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def show(migration: Migration, console: Console) -> None:
    """Print the table of each launch, and how much is left for a person."""
    for number, launch in enumerate(migration.launches, start=1):
        several = f" {number} of {len(migration.launches)}" if len(migration.launches) > 1 else ""
        console.print(f"[bold]Launch{several}[/bold]: {escape(launch.old.program or 'options')}")
        table = new_table("old", "verdict", "new", "why")
        for row in launch.rows:
            colour = _COLOURS.get(row.verdict)
            verdict = f"[{colour}]{row.verdict}[/{colour}]" if colour else str(row.verdict)
            table.add_row(escape(row.old), verdict, escape(row.new), escape(row.reason))
        console.print(table)
        if launch.unchecked:
            names = ", ".join(launch.unchecked)
            console.print(escape(f"Not checked, because only known when the launch runs: {names}"))
    count = len(migration.open_rows)
    left = {0: "Nothing needs", 1: "1 row needs"}.get(count, f"{count} rows need")
    console.print(f"{left} a person.")
