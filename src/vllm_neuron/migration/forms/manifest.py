"""YAML of Kubernetes and of docker compose: containers' `command`, `args` and `entrypoint` with their variables."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from vllm_neuron.migration.edits import Edit, apply
from vllm_neuron.migration.forms import exec_form, shell
from vllm_neuron.migration.launch import Change, Expression, Launch, LaunchError

_COMMANDS = ("entrypoint", "command", "args")
_ENVIRONMENTS = ("env", "environment")
_PLAIN = re.compile(r"(?:--)?[A-Za-z_/.][\w/.:@=-]*")
_COMMA = re.compile(r"\s*,\s*")
_RESERVED = re.compile(r"(?i)(?:true|false|yes|no|on|off|null|y|n)")


def rewrite(text: str, change: Change) -> str:
    """The document with each launch replaced by what ``change`` makes of it; comments inside a changed list are lost.

    Raises:
        LaunchError: it is not YAML.
    """
    try:
        documents = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
    except yaml.YAMLError as error:
        raise LaunchError(f"This is not YAML: {' '.join(str(error).split())}") from error
    edits = [
        edit for node in documents for container in _mappings(node) for edit in _container(text, container, change)
    ]
    return apply(text, edits)


def _mappings(node: yaml.Node) -> Iterator[dict[str, yaml.Node]]:
    """Every mapping of a document, as a dictionary of its nodes."""
    if isinstance(node, yaml.MappingNode):
        yield {str(key.value): value for key, value in node.value}
        for _, value in node.value:
            yield from _mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _mappings(value)


def _container(text: str, container: dict[str, yaml.Node], change: Change) -> Iterator[Edit]:
    commands = [container[name] for name in _COMMANDS if name in container]
    if not commands:
        return
    variables = [v for key in _ENVIRONMENTS if key in container for v in _variables(text, container[key])]
    environment = {variable.name: variable.value for variable in variables}
    dropped: set[str] = set()

    def changed(launch: Launch) -> Launch:
        new = change(launch)
        dropped.update(set(launch.environment) - set(new.environment))
        return new

    for node in commands:
        edit = _command(text, node, changed, environment)
        if edit is not None:
            yield edit
    yield from (variable.removal for variable in variables if variable.name in dropped)


def _command(text: str, node: yaml.Node, change: Change, environment: dict[str, str]) -> Edit | None:
    if isinstance(node, yaml.ScalarNode):
        new = shell.rewrite(node.value, change, environment)
        return None if new == node.value else _scalar_edit(text, node, new)
    if not isinstance(node, yaml.SequenceNode) or not all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return None
    old = [item.value for item in node.value]
    words = exec_form.rewrite(old, change, environment)
    if words is None or words == old:
        return None
    if node.flow_style:
        return Edit(node.start_mark.index, node.end_mark.index, f"[{', '.join(map(_quoted, words))}]")
    if len(words) == len(old):
        scripts = [(item, word) for item, word in zip(node.value, words, strict=True) if item.value != word]
        if len(scripts) == 1 and "\n" in scripts[0][1]:
            return _scalar_edit(text, *scripts[0])
    column = node.start_mark.column
    lines = f"\n{' ' * column}".join(f"- {_quoted(word)}" for word in words)
    return Edit(node.start_mark.index, _end(text, node.value[-1]), lines)


def _scalar_edit(text: str, node: yaml.ScalarNode, new: str) -> Edit:
    """A scalar's replacement: a block with the old one's indentation if there are several lines, else a quoted one."""
    start, end = node.start_mark.index, _end(text, node)
    if "\n" not in new.strip("\n"):
        return Edit(start, end, _quoted(new.strip("\n")))
    lines = text[start:end].splitlines()[1:]
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    indent = " " * (min(indents) if indents else node.start_mark.column + 2)
    body = "\n".join(indent + line if line else "" for line in new.rstrip("\n").split("\n"))
    return Edit(start, end, f"|\n{body}" if new.endswith("\n") else f"|-\n{body}")


def _end(text: str, node: yaml.Node) -> int:
    """Where a node ends, without the line breaks that belong to a block."""
    end = int(node.end_mark.index)
    while end > node.start_mark.index and text[end - 1] in "\r\n \t":
        end -= 1
    return end


def _quoted(word: str) -> str:
    """A word in YAML: plain where that is a string for certain."""
    if _PLAIN.fullmatch(word) and not _RESERVED.fullmatch(word) and not word.endswith(":"):
        return word
    return "'" + word.replace("'", "''") + "'" if "\n" not in word else yaml.dump(word, default_style='"').rstrip("\n")


class _Variable(NamedTuple):
    """A variable of a container, and what removes it from the document."""

    name: str
    value: str
    removal: Edit


def _variables(text: str, node: yaml.Node) -> Iterator[_Variable]:
    """Those of `name: value`, `- name=value` and `- {name: ..., value: ...}`."""
    flow = bool(node.flow_style) if isinstance(node, yaml.CollectionNode) else False
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield _Variable(key.value, _value(value), _removal(text, key, value, flow))
        return
    for item in node.value if isinstance(node, yaml.SequenceNode) else ():
        if isinstance(item, yaml.ScalarNode):
            name, _, rest = item.value.partition("=")
            yield _Variable(name, rest, _removal(text, item, item, flow))
        elif isinstance(item, yaml.MappingNode):
            pairs = {key.value: value for key, value in item.value}
            if isinstance(pairs.get("name"), yaml.ScalarNode):
                ends = (item, item) if flow else (item.value[0][0], item.value[-1][1])
                removal = _removal(text, *ends, flow)
                yield _Variable(pairs["name"].value, _value(pairs.get("value")), removal)


def _value(node: yaml.Node | None) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else Expression("")


def _removal(text: str, first: yaml.Node, last: yaml.Node, flow: bool) -> Edit:
    """Removes an item from one node to another: its lines, or in flow style the item with the comma after it."""
    if flow:
        comma = _COMMA.match(text, _end(text, last))
        return Edit(first.start_mark.index, comma.end() if comma else _end(text, last))
    start = text.rfind("\n", 0, first.start_mark.index) + 1
    end = text.find("\n", _end(text, last))
    return Edit(start, len(text) if end < 0 else end + 1)
