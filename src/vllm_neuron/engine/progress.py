"""One line per graph while a server warms up, so that nobody has to guess what it is doing and for how long."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphReady:
    """One graph is ready to run.

    Attributes:
        name: the graph's name.
        index: how many graphs are ready now, this one included.
        total: how many there are.
        seconds: time it took.
        cached: it came from the compile cache.
    """

    name: str
    index: int
    total: int
    seconds: float
    cached: bool

    def __str__(self) -> str:
        source = "cache hit" if self.cached else "compiled"
        return f"Graph {self.index} of {self.total}: {self.name} ready in {self.seconds:.2f} s ({source})"


Report = Callable[[GraphReady], None]
"""Is told of each graph as it becomes ready."""


@contextmanager
def warm_up_progress(total: int) -> Iterator[Report]:
    """A progress bar with a line per graph on a terminal, log lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda ready: logger.info("%s", ready)
        return
    columns = (TextColumn("Warming up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A stream of our own: vLLM prefixes everything its processes write to sys.stderr, which would tear the bar apart.
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal,
        Progress(*columns, console=Console(file=terminal), transient=True) as progress,
    ):
        task = progress.add_task("graphs", total=total)

        def report(ready: GraphReady) -> None:
            progress.console.print(str(ready), highlight=False)
            progress.update(task, completed=ready.index)

        yield report
