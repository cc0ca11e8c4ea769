"""Markdown tables that code writes into documents, between two comments."""

from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
START = "<!-- {}: written by python -m tests.documentation.generate -->\n"
END = "<!-- end of {} -->\n"


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table with a header; a | inside a cell is escaped."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def replaced(text: str, name: str, content: str) -> str:
    """`text` with `content` between the comments of `name`.

    Raises:
        ValueError: the comments are not there.
    """
    start = text.index(START.format(name)) + len(START.format(name))
    end = text.index(END.format(name), start)
    return text[:start] + content + text[end:]
