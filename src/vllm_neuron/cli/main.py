"""The `vllm-neuron` command. Heavy imports stay inside the commands, so that --help answers at once."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_neuron import __version__
from vllm_neuron.cli import checkpoints, evaluate, graphs, rollout
from vllm_neuron.cli.errors import exiting_on_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Companion of the vLLM platform plugin for AWS Neuron."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say which platform and compile route vLLM will use on this machine, and why.

    The exit code is 0 if the selected route works here, else 1.
    """
    from vllm_neuron.cli import render, report

    found = report.gather()
    if as_json:
        typer.echo(render.as_json(found))
    else:
        render.show(found)
    raise typer.Exit(0 if found.healthy else 1)


@app.command(name="migrate", context_settings={"ignore_unknown_options": True})
def migrate_launch(
    source: Annotated[
        str, typer.Argument(metavar="FILE|-|COMMAND", help="File with the old launch, - for stdin, or the text itself.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print a unified diff instead of the new launch.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the new launch there as well.")] = None,
    keep_tuning: Annotated[
        bool, typer.Option("--keep-tuning", help="Keep --block-size and --num-gpu-blocks-override.")
    ] = False,
    only_supported: Annotated[
        bool, typer.Option("--only-supported", help="Leave out what this release refuses as not supported yet.")
    ] = False,
) -> None:
    """Turn a launch of NxD Inference (the legacy Neuron integration of vLLM) into one of this plugin.

    Takes shell scripts and commands, python -m
    vllm.entrypoints.openai.api_server, LLM(...) calls, Dockerfiles, compose and
    Kubernetes files, and the JSON of --override-neuron-config. The new launch
    has the same form; it goes to stdout. What became of each setting, and why,
    goes to stderr.

    The result is checked by this plugin's validator and by vLLM's own parser.
    The exit code is 0 if nothing needs a person, 3 if something does, and 1 if
    the launch cannot be read.
    """
    from vllm_neuron.cli import migrate as command
    from vllm_neuron.cli.tables import result_console

    with exiting_on_errors():
        migration = command.run(source, keep_tuning, only_supported)
        if write is not None:
            write.write_text(migration.new)
    if as_json:
        typer.echo(command.as_json(migration))
    else:
        command.show(migration, result_console(stderr=True))
        text = command.diff(migration) if diff else migration.new
        typer.echo(text, nl=not text.endswith("\n"))
    raise typer.Exit(command.NEEDS_A_PERSON if migration.open_rows else 0)


checkpoints.add_to(app)
graphs.add_to(app)
evaluate.add_to(app)
app.add_typer(rollout.app, name="rollout")


def main() -> None:
    """Entry point of the `vllm-neuron` command."""
    app()
