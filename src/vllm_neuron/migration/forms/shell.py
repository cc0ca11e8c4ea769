"""Shell scripts and command lines: `vllm serve`, the API server as a module, both behind docker, nohup or `bash -c`.

Only the command that serves and the assignments of its environment are touched; the rest of the script stays.
"""

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_neuron.migration.arguments import (
    Word,
    as_words,
    find_program,
    is_flag,
    looks_like_arguments,
    read_options,
)
from vllm_neuron.migration.edits import Edit, apply, whole_lines
from vllm_neuron.migration.launch import Change, Expression, Launch, Option
from vllm_neuron.migration.words import Token, tokenize, unquote

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_RUNS_TEXT = re.compile(r"^-\w*c$")
_RUN_TEXT = ("eval", "ssh", "tmux", "screen")
"""What takes a script in quotes as an argument: a shell's -c, and these commands."""
_SERVES = re.compile(r"\bvllm\s+serve\b|vllm\.entrypoints\.")
_CONTINUED = re.compile(r"\\\r?\n([ \t]*)")
_SPACE = re.compile(r"(?:[ \t]|\\\r?\n)+")
_OURS = ("VLLM_", "NEURON_")
_ENVIRONMENT_FLAGS = ("-e", "--env")


@dataclass
class _Script:
    """A script while it is read.

    Attributes:
        text: all of it.
        change: what makes a new launch of an old one.
        nested: it stands in double quotes of another script.
        variables: values of variables assigned so far.
        exported: those of them that commands see.
        assigned: removals of the assignments of each variable.
        edits: what is to be changed.
        dropped, kept: variables that some launch does without, and that some launch keeps.
    """

    text: str
    change: Change
    nested: bool
    variables: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    assigned: dict[str, list[Edit]] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    def value(self, word: str) -> str:
        return unquote(word, self.variables, self.nested)

    def set(self, name: str, value: str, again: bool) -> None:
        """Assign a variable. One that different branches set differently is not known."""
        before = self.variables.get(name, value)
        self.variables[name] = value if again or before == value else Expression(f"${name}")

    def environment(self) -> dict[str, str]:
        """What a command sees: exported variables, and those whose names say that they were meant to be."""
        return {
            name: self.variables[name] for name in self.variables if name in self.exported or name.startswith(_OURS)
        }

    def migrate(self, launch: Launch) -> Launch:
        new = self.change(launch)
        self.dropped |= set(launch.environment) - set(new.environment)
        self.kept |= set(new.environment)
        return new


def rewrite(text: str, change: Change, environment: dict[str, str] | None = None, nested: bool = False) -> str:
    """The script with each launch replaced by what ``change`` makes of it.

    Args:
        text: a script, a command line, or only flags.
        change: called once for each launch.
        environment: variables that are set around the script.
        nested: it stands in double quotes of another script, which expands what is not escaped.
    """
    script = _Script(text, change, nested, dict(environment or {}), set(environment or {}))
    for command in _commands(text):
        _read_command(script, command)
    for name in script.dropped - script.kept:
        script.edits += script.assigned.get(name, [])
    return apply(text, script.edits)


def _commands(text: str) -> Iterator[list[Token]]:
    """The words of each simple command, up to its first redirection."""
    command: list[Token] = []
    redirected = False
    for token in tokenize(text):
        if token.kind == "word":
            if not redirected:
                command.append(token)
        elif token.kind == "redirect":
            redirected = True
        else:
            if command:
                yield command
            command, redirected = [], False
    if command:
        yield command


def _read_command(script: _Script, tokens: Sequence[Token]) -> None:
    words = [Word(script.value(token.text), token.text) for token in tokens]
    program = find_program(words)
    leading = next((i for i, token in enumerate(tokens) if not _ASSIGNMENT.match(token.text)), len(tokens))
    if leading == len(tokens):
        _assign(script, tokens)
    elif tokens[0].text in ("export", "declare", "typeset"):
        _assign(script, tokens[1:], tokens[0])
    elif program is not None:
        first, arguments, name = program
        environment = _environment(script, tokens[:first])
        options = read_options(_split(words[arguments:]))
        _replace(script, tokens[first:], Launch(name, options, {**script.environment(), **environment}))
    elif is_flag(words[0].text) and looks_like_arguments(options := read_options(_split(words))):
        _replace(script, tokens, Launch("", options, script.environment()))
    else:
        for before, token in itertools.pairwise(tokens):
            runs = _RUNS_TEXT.search(before.text) or tokens[0].text in _RUN_TEXT
            if runs and token.text[0] in "'\"" and _SERVES.search(token.text):
                script.edits.append(Edit(token.start, token.end, _nested(script, token, tokens)))


def _split(words: Sequence[Word]) -> list[Word]:
    """The words as the shell sees them: a variable without quotes becomes as many words as its value has."""
    found: list[Word] = []
    for word in words:
        bare = (word.written or "").startswith("$") and not isinstance(word.text, Expression)
        parts = word.text.split() if bare else []
        if len(parts) < 2:
            found.append(word)
        else:
            found += [Word(parts[0], word.written), *(Word(part, "") for part in parts[1:])]
    return found


def _replace(script: _Script, tokens: Sequence[Token], launch: Launch) -> None:
    start, end = tokens[0].start, tokens[-1].end
    script.edits.append(Edit(start, end, render(script.migrate(launch), script.text[start:end])))


def _assign(script: _Script, tokens: Sequence[Token], export: Token | None = None) -> None:
    """Assignments without a command. A variable goes together with its statement if it is alone there."""
    for token in tokens:
        match = _ASSIGNMENT.match(token.text)
        if match is None:
            continue
        name, appends = match[1], bool(match[2])
        value = script.value(token.text[match.end() :])
        script.set(name, _joined(script.variables.get(name, ""), value) if appends else value, appends)
        if export is not None:
            script.exported.add(name)
        start = export.start if export is not None and len(tokens) == 1 else token.start
        script.assigned.setdefault(name, []).append(whole_lines(script.text, start, token.end))


def _joined(first: str, second: str) -> str:
    known = not isinstance(first, Expression) and not isinstance(second, Expression)
    return first + second if known else Expression(first + second)


def _environment(script: _Script, before: Sequence[Token]) -> dict[str, str]:
    """Variables that stand before the program: assignments, and those that docker is given."""
    environment = {}
    for index, token in enumerate(before):
        match = _ASSIGNMENT.match(token.text)
        if not match:
            continue
        docker = index > 0 and before[index - 1].text in _ENVIRONMENT_FLAGS
        name = match[1]
        environment[name] = script.value(token.text[match.end() :])
        start = before[index - 1].start if docker else token.start
        place = _SPACE.match(script.text, token.end)
        script.assigned.setdefault(name, []).append(Edit(start, place.end() if place else token.end))
    return environment


def _nested(script: _Script, token: Token, tokens: Sequence[Token]) -> str:
    """A script in quotes: `bash -c "vllm serve ..."`. Its quotes stay what they are."""
    environment = {**script.environment(), **_environment(script, [t for t in tokens if t.end <= token.start])}
    quote, body = token.text[0], token.text[1:-1]
    if quote == "'":
        return shlex.quote(rewrite(body.replace("'\"'\"'", "'").replace("'\\''", "'"), script.migrate, environment))
    inner = rewrite(body.replace('\\"', '"'), script.migrate, environment, nested=True)
    return f'"{inner.replace(chr(34), chr(92) + chr(34))}"'


def render(launch: Launch, old: str = "") -> str:
    """A command line in shell syntax, over as many lines as the old one took."""
    parts = list(_parts(launch))
    continued = _CONTINUED.search(old)
    if continued is None:
        return " ".join(parts)
    return f" \\\n{continued[1]}".join(parts)


def _parts(launch: Launch) -> Iterator[str]:
    model = launch.options.get("model")
    options = [option for option in launch.options.values() if option.name != "model" or not launch.program]
    if launch.program:
        yield launch.program if model is None else f"{launch.program} {_value(model)}"
    for option in options:
        if option is model:
            yield _value(option) if option.positional else f"{option.flag} {_value(option)}"
        else:
            yield option.written or shlex.join(as_words(option))


def _value(model: Option) -> str:
    return model.written or shlex.quote(str(model.value))
