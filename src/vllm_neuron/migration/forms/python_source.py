"""Python: calls such as `LLM(...)` and `AsyncEngineArgs(...)`, and variables set in `os.environ`."""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_neuron.migration.edits import Edit, apply, lines_of
from vllm_neuron.migration.launch import CALLS, Change, Expression, Launch, LaunchError, Option

INDENT = 4


def rewrite(text: str, change: Change) -> str:
    """The source with each call replaced by what ``change`` makes of it. Comments inside a changed call are lost.

    Raises:
        LaunchError: it is not Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise LaunchError(f"This is not Python: line {error.lineno}: {error.msg}.") from error
    source = _Source(text)
    names = _assigned(tree, source)
    variables = dict(_environment(tree, source, names))
    environment = {name: value for name, (value, _) in variables.items()}
    edits, kept, called = [], set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in CALLS:
            new = change(Launch(_name(node.func), _options(node, source, names), environment))
            kept |= set(new.environment)
            called = True
            edits.append(Edit(*source.span(node), _render(node, new, source)))
    if called:
        edits += [edit for name, (_, edit) in variables.items() if name not in kept]
    return apply(text, edits)


class _Source:
    """Places in a text. Python counts columns in UTF-8 bytes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def _place(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self._place(node.lineno, node.col_offset), self._place(end_line, end_column)

    def of(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def indentation(self, node: ast.expr) -> str:
        line = self._lines[node.lineno - 1]
        return line[: len(line) - len(line.lstrip())]


def _name(function: ast.expr) -> str:
    """The last part of a dotted name."""
    return ast.unparse(function).rsplit(".", 1)[-1]


def _assigned(tree: ast.Module, source: _Source) -> dict[str, Any]:
    """Values of names that are assigned once, in the order of the source; later ones may use earlier ones."""
    assignments = [
        (node.targets[0].id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    ]
    times = [name for name, _ in assignments]
    names: dict[str, Any] = {}
    for name, value in sorted(assignments, key=lambda found: found[1].lineno):
        if times.count(name) == 1:
            names[name] = _value(value, source, names)
    return {name: value for name, value in names.items() if not isinstance(value, Expression)}


def _value(node: ast.expr, source: _Source, names: Mapping[str, Any]) -> Any:
    """A literal, with Expressions for those of its parts that are none."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.List() | ast.Tuple():
            return [_value(item, source, names) for item in node.elts]
        case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            return {key: _value(value, source, names) for key, value in zip(keys, node.values, strict=True)}
        case ast.Call(func=ast.Name(id="dict"), args=[]) if all(keyword.arg for keyword in node.keywords):
            return {keyword.arg: _value(keyword.value, source, names) for keyword in node.keywords}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Attribute(value=ast.Name(id="torch")):
            return node.attr
    return Expression(source.of(node))


def _environment(tree: ast.Module, source: _Source, names: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Edit]]]:
    """(name, (value, its removal)) for each `os.environ[name] = value` and `os.environ.setdefault(name, value)`."""
    lonely = {body[0] for node in ast.walk(tree) for body in _bodies(node) if len(body) == 1}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=place, slice=ast.Constant(value=str() as name))]):
                value = node.value
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=place, attr="setdefault"), args=[key, value])):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    continue
                name = key.value
            case _:
                continue
        if _name(place) == "environ":
            found = _value(value, source, names)
            text = found if isinstance(found, Expression) else str(found)
            yield name, (text, _removal(node, source, node in lonely))


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Blocks of statements of a node, none of which may become empty; the module itself may."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and not isinstance(node, ast.Module):
            yield body


def _removal(node: ast.stmt, source: _Source, lonely: bool) -> Edit:
    """Removes a statement with its lines, or puts `pass` in its place where something has to stand."""
    start, end = source.span(node)
    lines, alone = lines_of(source.text, start, end)
    return lines if alone and not lonely else Edit(start, end, "pass")


def _options(call: ast.Call, source: _Source, names: Mapping[str, Any]) -> dict[str, Option]:
    options = {}
    for name, node in (("model", call.args[0] if call.args else None), *((k.arg, k.value) for k in call.keywords)):
        if name and node is not None:
            options[name] = Option(name, _value(node, source, names), source.of(node))
    return options


def _render(call: ast.Call, new: Launch, source: _Source) -> str:
    """The call with the new options, over several lines if it was."""
    arguments = []
    for option in new.options.values():
        text = option.written or literal(option.value)
        positional = option.name == "model" and bool(call.args)
        arguments.append(text if positional else f"{option.name}={text}")
    arguments += [f"**{source.of(keyword.value)}" for keyword in call.keywords if keyword.arg is None]
    start, end = source.span(call)
    function = source.of(call.func)
    if "\n" not in source.text[start:end]:
        return f"{function}({', '.join(arguments)})"
    outer = source.indentation(call)
    inner = outer + " " * INDENT
    return f"{function}(\n" + "".join(f"{inner}{argument},\n" for argument in arguments) + f"{outer})"


def literal(value: Any) -> str:
    """Python source of a value, with Expressions as they are."""
    match value:
        case Expression():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)
