"""The words of a shell script with their places, so that a script can be changed in place."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from vllm_neuron.migration.launch import Expression

_TOKEN = re.compile(
    r"""
      (?P<space>(?:[ \t\r]|\\\r?\n)+)
    | (?P<comment>\#[^\n]*)
    | (?P<newline>\n)
    | (?P<redirect>(?:\d+|&)?(?:<<<|<<|>>|[<>])(?:&(?:\d+|-))?)
    | (?P<operator>&&|\|\||;;|[;&|()])
    | (?P<word>(?:
          \\. | '[^']*' | "(?:[^"\\]|\\.)*" | \$\{[^}]*\} | \$[(@*\#?!$] | `[^`]*` | [^\s'"\\;&|<>()`$] | \$
        )+)
    | (?P<rest>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_PIECE = re.compile(
    r"""\\(?P<escaped>.) | '(?P<single>[^']*)' | "(?P<double>(?:[^"\\]|\\.)*)" | (?P<bare>[^\\'"]+|["'])""",
    re.VERBOSE | re.DOTALL,
)
_EXPANSION = re.compile(
    r"""\\(?P<escaped>[\\"$`\n]) | \$(?P<plain>\w+) | \$\{(?P<braced>\w+)\} | \$\{[^}]*\} | \$[(@*\#?!$]""", re.VERBOSE
)


class Token(NamedTuple):
    """Part of a script: "word", "newline", "redirect" or "operator", its text as it stands, and where it stands."""

    kind: str
    text: str
    start: int
    end: int


def tokenize(text: str) -> Iterator[Token]:
    """Everything of a script but white space and comments. A quote that is never closed is a word of its own."""
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "rest"
        if kind not in ("space", "comment"):
            yield Token("word" if kind == "rest" else kind, match[0], match.start(), match.end())


def unquote(text: str, variables: Mapping[str, str], nested: bool = False) -> str:
    """The value of a word: without quotes, with known variables in place.

    Returns an Expression, in which unknown variables stand as they were, if the value is only known when the script
    runs. In a script that is ``nested`` in double quotes that is so for escaped variables too.
    """
    value, known = "", not (nested and "\\$" in text)
    for piece in _PIECE.finditer(text):
        if piece["single"] is not None:
            value += piece["single"]
        elif piece["escaped"] is not None:
            value += "" if piece["escaped"] == "\n" else piece["escaped"]
        else:
            expanded = _expand(piece["bare"] or piece["double"] or "", variables)
            value += expanded
            known = known and not isinstance(expanded, Expression)
    return value if known else Expression(value)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Text outside single quotes with its variables and escaped characters replaced."""
    known = "`" not in text

    def replace(match: re.Match[str]) -> str:
        nonlocal known
        if match["escaped"] is not None:
            return "" if match["escaped"] == "\n" else match["escaped"]
        value = variables.get(match["plain"] or match["braced"] or "")
        if value is None or isinstance(value, Expression):
            known = False
            return match[0]
        return value

    expanded = _EXPANSION.sub(replace, text)
    return expanded if known else Expression(expanded)
