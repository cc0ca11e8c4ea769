"""The commands about compiled graphs, as `vllm-neuron` has them."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_neuron.cli.errors import exiting_on_errors

cache_app = typer.Typer(help="List, remove and check compiled graphs of all routes.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of artifacts or a remote cache. Default: the cache under VLLM_CACHE_ROOT."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name="compile", context_settings=settings)(compile_graphs)
    app.add_typer(cache_app, name="cache")


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
