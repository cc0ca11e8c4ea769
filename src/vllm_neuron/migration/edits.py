"""Changing a text in a few places and leaving the rest of it as it is."""

from collections.abc import Iterable
from typing import NamedTuple


class Edit(NamedTuple):
    """Put `text` in the place of what is from `start` up to `end`."""

    start: int
    end: int
    text: str = ""


def apply(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made. None may overlap another; repeated ones are made once."""
    for edit in sorted(set(edits), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def lines_of(text: str, start: int, end: int) -> tuple[Edit, bool]:
    """What removes the lines that a place is on, and whether nothing else is on them."""
    first = text.rfind("\n", 0, start) + 1
    after = text.find("\n", end)
    last = len(text) if after < 0 else after + 1
    return Edit(first, last), not text[first:start].strip() and not text[end:last].strip(" \t\r\n;")


def whole_lines(text: str, start: int, end: int) -> Edit:
    """Removes a place with the spaces after it, and the lines it is on if nothing else is on them."""
    lines, alone = lines_of(text, start, end)
    return lines if alone else Edit(start, end + len(text[end:]) - len(text[end:].lstrip(" \t")))
