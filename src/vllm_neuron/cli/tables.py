"""How the commands print tables: as wide as the terminal, and whole where the output is no terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

_WIDE = 200
MB, GB = 10**6, 10**9
SHOWN_DIGITS = 12
"""Of a key: enough to tell any two apart, and to name one on a command line."""
FEWEST_DIGITS = 6
"""Of a key that a command takes for it."""


def result_console(stderr: bool = False) -> Console:
    """Standard output, or standard error. Lines that a pipe or a file gets are not broken at 80 characters."""
    console = Console(stderr=stderr, soft_wrap=True, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, width=_WIDE, soft_wrap=True, highlight=False)


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; columns named in ``numbers`` are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def megabytes(num_bytes: int) -> str:
    """A number of bytes in MB (10**6 bytes), without the unit."""
    return f"{num_bytes / MB:,.2f}"
