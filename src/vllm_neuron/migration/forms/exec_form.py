"""Commands that are lists of words: Dockerfiles' exec form, `command` and `args` of containers."""

import re
from collections.abc import Sequence

from vllm_neuron.migration.arguments import (
    Word,
    command_words,
    find_program,
    is_flag,
    looks_like_arguments,
    read_options,
)
from vllm_neuron.migration.forms import shell
from vllm_neuron.migration.launch import Change, Expression, Launch

_SCRIPT = re.compile(r"\bvllm\s+serve\s|vllm\.entrypoints\.\S+\s")
_LATE = re.compile(r"\$[({]")


def rewrite(words: Sequence[str], change: Change, environment: dict[str, str]) -> list[str] | None:
    """The words of the new command; None if these start nothing of vLLM's, or only name its program.

    Args:
        words: of the old command; "$(NAME)" and "${NAME}" in them are known only later.
        change: called for each launch.
        environment: that the command is given.
    """
    if any(_SCRIPT.search(word) for word in words):
        return [shell.rewrite(word, change, environment) if _SCRIPT.search(word) else word for word in words]
    late = [Word(Expression(word) if _LATE.search(word) else word) for word in words]
    found = find_program(late)
    first, arguments, program = found or (0, 0, "")
    if arguments == len(words):
        return None
    options = read_options(late[arguments:])
    if found is None and not looks_like_arguments(options):
        return None
    joined = any(is_flag(word) and "=" in word for word in words)
    return [*words[:first], *command_words(change(Launch(program, options, environment)), joined)]
