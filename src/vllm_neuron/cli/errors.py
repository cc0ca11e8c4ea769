"""The one error of the commands, and how they end with it."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


class CommandError(RuntimeError):
    """A command cannot do what it was asked.

    Attributes:
        faults: what is wrong and what to do, a line each.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


@contextmanager
def exiting_on_errors() -> Iterator[None]:
    """Print what a command cannot do as `Error: ...`, a line per fault, and end with exit code 1."""
    try:
        yield
    except (CommandError, OSError) as error:
        for fault in getattr(error, "faults", [str(error)]):
            typer.echo(f"Error: {fault}", err=True)
        raise typer.Exit(1) from error
