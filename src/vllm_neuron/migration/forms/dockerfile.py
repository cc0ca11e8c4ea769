"""Dockerfiles: CMD and ENTRYPOINT in either form, with the variables of ENV."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from vllm_neuron.migration.edits import Edit, apply
from vllm_neuron.migration.forms import exec_form, shell
from vllm_neuron.migration.launch import Change, Launch
from vllm_neuron.migration.words import tokenize, unquote

_INSTRUCTION = re.compile(r"^[ \t]*(?P<name>[A-Za-z]+)[ \t]+(?P<rest>(?:[^\\\n]|\\.|\\\n)*)\n?", re.MULTILINE)


class _Instruction(NamedTuple):
    name: str
    rest: str
    start: int
    rest_start: int
    end: int


def rewrite(text: str, change: Change) -> str:
    """The Dockerfile with each launch replaced by what ``change`` makes of it."""
    instructions = list(_instructions(text))
    environment: dict[str, str] = {}
    for instruction in instructions:
        if instruction.name == "ENV":
            environment |= _variables(instruction.rest)
    dropped: set[str] = set()

    def changed(launch: Launch) -> Launch:
        new = change(launch)
        dropped.update(set(launch.environment) - set(new.environment))
        return new

    edits = []
    for instruction in instructions:
        if instruction.name in ("CMD", "ENTRYPOINT"):
            start = instruction.rest_start
            new = _command(instruction.rest, changed, environment)
            edits.append(Edit(start, start + len(instruction.rest), new))
    edits += [edit for instruction in instructions if (edit := _without(instruction, dropped))]
    return apply(text, edits)


def _instructions(text: str) -> Iterator[_Instruction]:
    for match in _INSTRUCTION.finditer(text):
        yield _Instruction(match["name"].upper(), match["rest"], match.start(), match.start("rest"), match.end())


def _command(rest: str, change: Change, environment: dict[str, str]) -> str:
    try:
        words = json.loads(rest.replace("\\\n", "\n"))
    except ValueError:
        return shell.rewrite(rest, change, environment)
    new = exec_form.rewrite(list(map(str, words)), change, environment)
    return rest if new is None else json.dumps(new, ensure_ascii=False)


def _variables(rest: str) -> dict[str, str]:
    """ENV takes `NAME=value ...`, and `NAME value` for one."""
    words = [token.text for token in tokenize(rest)]
    if words and "=" not in words[0]:
        return {words[0]: rest.split(None, 1)[1].strip()} if len(words) > 1 else {}
    pairs = (word.partition("=") for word in words)
    return {name: unquote(value, {}) for name, equals, value in pairs if equals}


def _without(instruction: _Instruction, dropped: set[str]) -> Edit | None:
    """ENV without the variables that are gone; the whole instruction goes if none is left."""
    if instruction.name != "ENV" or not dropped & set(variables := _variables(instruction.rest)):
        return None
    if set(variables) <= dropped:
        return Edit(instruction.start, instruction.end)
    kept = [token.text for token in tokenize(instruction.rest) if token.text.partition("=")[0] not in dropped]
    return Edit(instruction.rest_start, instruction.rest_start + len(instruction.rest), " ".join(kept))
