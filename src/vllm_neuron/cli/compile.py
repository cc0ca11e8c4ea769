"""`vllm-neuron compile`: every graph of a configuration, compiled or found, and where it came from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vllm_neuron.cli.errors import CommandError
from vllm_neuron.cli.tables import SHOWN_DIGITS, megabytes, new_table
from vllm_neuron.compilation.cache import local_cache_root
from vllm_neuron.compilation.pool import JobFailedError
from vllm_neuron.compilation.store import EntryStore, Manifest
from vllm_neuron.engine.compiler import CompileForbiddenError, GraphCompiler
from vllm_neuron.engine.graphs import GraphSpec, list_graphs
from vllm_neuron.engine.hbm import HBMAllocationError, hbm_failures_explained
from vllm_neuron.engine.precompile import precompiled
from vllm_neuron.engine.progress import GraphReady, compile_progress
from vllm_neuron.kernels.cpu.build import KernelBuildError
from vllm_neuron.plugin.compile import CompileFaultsError, prepare
from vllm_neuron.routes.neuronx_cc import CompilerError


@dataclass(frozen=True)
class Row:
    """A graph of the result: a tier of the cache that it came from, or "compiled", and the seconds that took."""

    source: str
    seconds: float
    manifest: Manifest


@dataclass(frozen=True)
class Result:
    """What `vllm-neuron compile` did.

    Attributes:
        route: value of VLLM_NEURON_BACKEND.
        folder: where all graphs are now, a subfolder per route.
        is_artifacts: the folder is one that NEURON_COMPILED_ARTIFACTS can name.
        num_blocks: blocks of the KV cache that the graphs are made for.
        rows: one per graph, largest graph first.
        notes: what the user should know.
    """

    route: str
    folder: Path
    is_artifacts: bool
    num_blocks: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def compiled(self) -> int:
        """Graphs that no tier of the cache had."""
        return sum(row.source == "compiled" for row in self.rows)

    @property
    def summary(self) -> str:
        """The last line of the output."""
        return f"graphs: {len(self.rows)}, compiled: {self.compiled}, cached: {len(self.rows) - self.compiled}"


def run(arguments: Sequence[str], output: Path | None, texts: Path | None) -> Result:
    """Compile everything that a command line of `vllm serve` needs.

    Args:
        arguments: model and flags.
        output: folder to fill; None is NEURON_COMPILED_ARTIFACTS, or only the local cache.
        texts: folder for the traced and the lowered text of each graph; None for none.

    Raises:
        CommandError: it cannot be done, or the result could not be kept.
        OSError: the texts cannot be written.
    """
    try:
        job = prepare(arguments, output)
    except CompileFaultsError as error:
        raise CommandError(*error.faults) from error
    compiler = job.compiler
    graphs = list_graphs(compiler.config)
    try:
        if texts is not None:
            save_texts(compiler, graphs, texts)
        with hbm_failures_explained(compiler.config):
            rows = _compile_all(compiler, graphs)
    except (KernelBuildError, CompilerError, JobFailedError, HBMAllocationError) as error:
        raise CommandError(str(error)) from error
    artifacts = compiler.config.compiled_artifacts
    folder = Path(artifacts) if artifacts else local_cache_root()
    _require_kept(EntryStore(folder / compiler.route.name), rows)
    return Result(compiler.route.name, folder, artifacts is not None, compiler.num_blocks, tuple(rows), job.notes)


def save_texts(compiler: GraphCompiler, graphs: Sequence[GraphSpec], folder: Path) -> None:
    """Write each graph as it is traced and as it is lowered: <graph>.traced.txt and <graph>.lowered.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    for graph in graphs:
        (folder / f"{graph.name}.traced.txt").write_text(compiler.trace(graph).text())
        (folder / f"{graph.name}.lowered.txt").write_text(compiler.lower(graph).text())


def _compile_all(compiler: GraphCompiler, graphs: Sequence[GraphSpec]) -> list[Row]:
    """Every graph in turn; where compiling is forbidden all that are missing are named together."""
    rows, missing = [], []
    with precompiled(compiler, graphs) as compile_, compile_progress(len(graphs)) as report:
        for index, graph in enumerate(graphs, start=1):
            try:
                compiled = compile_(graph)
            except CompileForbiddenError as error:
                missing.append(str(error))
                continue
            rows.append(Row(compiled.source, compiled.seconds, compiled.manifest))
            report(GraphReady(graph.name, index, len(graphs), compiled.seconds, compiled.source))
    if missing:
        raise CommandError(*missing)
    return rows


def _require_kept(store: EntryStore, rows: Sequence[Row]) -> None:
    lost = [row.manifest.graph for row in rows if not store.has(row.manifest.key)]
    if lost:
        raise CommandError(
            f"{len(lost)} of {len(rows)} graphs could not be written to {store.folder}: {', '.join(lost)}. The "
            "warning above says why; make the folder writable, or name another one with --output."
        )


def as_json(result: Result) -> str:
    """The result as one JSON object."""
    graphs = [
        {
            "graph": row.manifest.graph,
            "source": row.source,
            "seconds": round(row.seconds, 3),
            "bytes": row.manifest.num_bytes,
            "key": row.manifest.key,
        }
        for row in result.rows
    ]
    document = {
        "route": result.route,
        "folder": str(result.folder),
        "num_gpu_blocks": result.num_blocks,
        "graphs": graphs,
        "compiled": result.compiled,
        "cached": len(graphs) - result.compiled,
        "notes": list(result.notes),
    }
    return json.dumps(document, indent=2)


def show(result: Result, console: Console) -> None:
    """Print the result for people."""
    table = new_table("graph", "source", "seconds", "MB", "key", numbers=("seconds", "MB"))
    for row in result.rows:
        manifest = row.manifest
        size = megabytes(manifest.num_bytes)
        table.add_row(manifest.graph, row.source, f"{row.seconds:.2f}", size, manifest.key[:SHOWN_DIGITS])
    console.print(table)
    for note in result.notes:
        console.print(f"Note: {escape(note)}")
    if result.is_artifacts:
        console.print(f"{escape(str(result.folder))} has all of them: serve with NEURON_COMPILED_ARTIFACTS naming it.")
    else:
        console.print(f"{escape(str(result.folder))} has all of them; --output DIR makes a folder to carry elsewhere.")
    console.print(result.summary)
