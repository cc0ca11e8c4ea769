"""Reading dictionaries that people put on command lines: JSON, Python literals, and JSON that lost its quotes."""

import ast
import json
import re
from typing import Any

import yaml

_CONTINUATION = re.compile(r"\\\s*\n")
_COLON = re.compile(r"(?<=[\w\"'])\s*:\s*(?=[^\s/])")


def read_mapping(text: str) -> tuple[dict[str, Any], bool] | None:
    """A dictionary and whether it is exact, or None if the text is none.

    Not exact is what no JSON parser takes: Python's True and None, a trailing comma, or the remains of a command such
    as `--override-neuron-config "{"enable_bucketing":false}"`, out of which the shell has taken the inner quotes.
    """
    text = _CONTINUATION.sub("\n", text).strip()
    for read, exact in ((json.loads, True), (ast.literal_eval, False), (_without_quotes, False)):
        try:
            value = read(text)
        except (ValueError, SyntaxError, yaml.YAMLError):
            continue
        if isinstance(value, dict):
            return {str(key): item for key, item in value.items()}, exact
    return None


def _without_quotes(text: str) -> Any:
    """YAML's flow style, which needs a space after colons where JSON's quotes are missing."""
    if not text.startswith("{"):
        return None
    return yaml.safe_load(_COLON.sub(": ", text).replace("\t", " "))


def with_underscores(mapping: dict[str, Any]) -> dict[str, Any]:
    """The same with `-` in the names of all levels replaced by `_`; both spellings were in use."""
    return {
        key.replace("-", "_"): with_underscores(value) if isinstance(value, dict) else value
        for key, value in mapping.items()
    }


def whole_number(value: Any) -> int | None:
    """The integer that a value stands for, or None. Booleans and fractions are none."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        return None
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def numbers(value: Any) -> list[int] | None:
    """A list of integers, also of text such as "128,512", or None."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return None
    found = [whole_number(item) for item in items]
    return [item for item in found if item is not None] if found and None not in found else None


def is_on(value: Any) -> bool:
    """Whether a switch is on; text counts as what it says."""
    return value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else bool(value)
