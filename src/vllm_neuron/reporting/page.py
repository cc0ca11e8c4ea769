"""A report as one HTML file: text, tables and charts, and nothing that is fetched from anywhere."""

from collections.abc import Sequence
from html import escape

STYLE = """
body { font-family: sans-serif; color: #222; max-width: 84em; margin: 2em auto; padding: 0 1em; line-height: 1.4 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .25em .8em; border-bottom: 1px solid #ddd }
th { text-align: left; border-bottom: 2px solid #888 } td.number { text-align: right }
pre { background: #f4f4f4; padding: .8em; overflow-x: auto } svg { margin: .5em 1em .5em 0; max-width: 100% }
.passed { color: #2a7a2a } .failed { color: #b02a2a }
"""


def page(title: str, *parts: str) -> str:
    """The document of parts that `heading`, `paragraph`, `table`, `verdict`, `code` and charts have made."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def heading(text: str) -> str:
    """A section's heading."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def code(text: str) -> str:
    """Text to be copied."""
    return f"<pre>{escape(text)}</pre>"


def verdict(passed: bool, reasons: Sequence[str]) -> str:
    """Passed or failed, and why."""
    state = "passed" if passed else "failed"
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<p class="{state}"><strong>{state}</strong></p><ul>{listed}</ul>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells that begin with a digit or a minus sign are aligned to the right."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    kind = ' class="number"' if text[:1].isdigit() or text[:1] == "-" else ""
    return f"<td{kind}>{escape(text)}</td>"
