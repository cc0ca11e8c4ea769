"""One line per graph while a server warms up, so that nobody has to guess what it is doing and for how long."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_neuron.compilation.cache import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphEvent:
    """Something has happened to one graph of several.

    Attributes:
        name: the graph's name.
        index: how many graphs it has happened to now, this one included.
        total: how many it happens to.
        seconds: time it took.
        source: a tier of the compile cache that the graph came from, or "compiled".
    """

    name: str
    index: int
    total: int
    seconds: float
    source: Source


class GraphReady(GraphEvent):
    """One graph is ready to run."""

    def __str__(self) -> str:
        source = self.source if self.source == "compiled" else f"{self.source} cache hit"
        return f"Graph {self.index} of {self.total}: {self.name} ready in {self.seconds:.2f} s ({source})"


class GraphCompiled(GraphEvent):
    """One graph has been compiled ahead, by a process of its own; it is in the cache and has yet to be loaded."""

    def __str__(self) -> str:
        found = "" if self.source == "compiled" else f" ({self.source} cache hit)"
        return f"Compiled {self.index} of {self.total}: {self.name} in {self.seconds:.1f} s{found}"


Report = Callable[[GraphEvent], None]
"""Is told of each graph as it becomes ready, and before that of those that are compiled ahead."""


@contextmanager
def warm_up_progress(total: int) -> Iterator[Report]:
    """A progress bar with a line per graph on a terminal, log lines elsewhere."""
    with _progress("Warming up", total) as report:
        yield report


@contextmanager
def compile_progress(total: int) -> Iterator[Report]:
    """The same for graphs that are compiled ahead."""
    with _progress("Compiling", total) as report:
        yield report


@contextmanager
def _progress(doing: str, total: int) -> Iterator[Report]:
    if not sys.stderr.isatty():
        yield lambda graph: logger.info("%s", graph)
        return
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A stream of our own: vLLM prefixes everything its processes write to sys.stderr, which would tear the bar apart.
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal,
        Progress(*columns, console=Console(file=terminal), transient=True) as progress,
    ):
        task = progress.add_task("graphs", total=total)

        def report(graph: GraphEvent) -> None:
            progress.console.print(str(graph), highlight=False)
            progress.update(task, completed=graph.index)

        yield report
