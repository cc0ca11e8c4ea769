"""The language that NKI's compiler accepts, which is a part of Python: a check of a kernel's source.

The rules are those that the NKI language guide, its release notes and its migration guide name; constructs that none of
them mentions are rejected too. Functions that a kernel
calls are checked too, as far as they are Python functions of the kernel's own modules.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from vllm_neuron.kernels.simulator.errors import HERE, Violation

_STATEMENTS: dict[type[ast.AST], str] = {
    ast.Try: "try/except",
    ast.TryStar: "try/except",
    ast.Raise: "raise (use assert)",
    ast.With: "with",
    ast.AsyncWith: "async",
    ast.AsyncFor: "async",
    ast.AsyncFunctionDef: "async",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.GeneratorExp: "a generator expression",
    ast.DictComp: "a dictionary comprehension",
    ast.SetComp: "a set comprehension",
    ast.Set: "a set",
    ast.ClassDef: "a class inside a kernel",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Delete: "del",
    ast.Import: "import inside a kernel",
    ast.ImportFrom: "import inside a kernel",
    ast.NamedExpr: "an assignment expression (:=)",
    ast.Match: "match",
    ast.Starred: "* in a call or an assignment",
}


def check_language(function: Callable[..., Any]) -> bool:
    """Check a kernel and the functions that it calls.

    Returns:
        Whether the kernel's source could be read; that of `python -c` and of a lambda cannot.

    Raises:
        Violation: it uses Python that the compiler rejects; with the construct and its line.
    """
    for rule, line in _broken(function):
        raise Violation("language", rule, "", line)
    return _source(function) is not None


@cache
def _broken(function: Callable[..., Any]) -> tuple[tuple[str, str], ...]:
    return tuple(_found(function, set()))


def _found(function: Any, seen: set[Any]) -> Iterator[tuple[str, str]]:
    if function in seen:
        return
    seen.add(function)
    source = _source(function)
    if source is None:
        return
    definition, first, file = source
    for rule, number in _of_tree(definition, function):
        yield (
            f"{function.__name__} uses {rule}, which the language of NKI does not have",
            f"{file}:{first + number - 1}",
        )
    for name, value in _globals_of(definition, function):
        if _is_kernel(value):
            rule = (
                f"{function.__name__} calls {name}, which is decorated with nki.jit: functions a kernel calls are not"
            )
            yield rule, f"{file}:{first}"
        elif isinstance(value, types.FunctionType) and not value.__code__.co_filename.startswith(HERE):
            yield from _found(value, seen)


def _source(function: Any) -> tuple[ast.FunctionDef, int, str | None] | None:
    """The definition of a function, the number of its first line, and its file; None if it cannot be had."""
    try:
        lines, first = inspect.getsourcelines(function)
        definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return (definition, first, inspect.getsourcefile(function)) if isinstance(definition, ast.FunctionDef) else None


def _is_kernel(value: Any) -> bool:
    return isinstance(getattr(value, "function", None), types.FunctionType) and hasattr(value, "lnc")


def _of_tree(definition: ast.FunctionDef, function: Any) -> Iterator[tuple[str, int]]:
    parents = {child: node for node in ast.walk(definition) for child in ast.iter_child_nodes(node)}
    body = [node for statement in definition.body for node in ast.walk(statement)]
    yield from _signature(definition)
    for node in body:
        text = _STATEMENTS.get(type(node))
        if text is not None:
            yield text, node.lineno  # type: ignore[attr-defined]
        elif isinstance(node, ast.FunctionDef):
            yield from _signature(node)
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            yield "is / is not (use == and !=)", node.lineno
        elif isinstance(node, ast.Dict) and any(_odd_key(key) for key in node.keys):
            yield "a dictionary with keys that are no strings", node.lineno
        elif isinstance(node, ast.JoinedStr) and not _in_message(node, parents):
            yield "an f-string outside of an assert", node.lineno
    for name, value in _globals_of(definition, function):
        if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] in ("numpy", "torch", "jax"):
            yield f"{name} ({value.__name__})", 1
        elif isinstance(value, list | dict | set):
            yield f"the mutable global {name}", 1


def _signature(definition: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    arguments = definition.args
    if arguments.kwonlyargs:
        yield "keyword-only parameters (*)", definition.lineno
    if arguments.vararg or arguments.kwarg:
        yield "*args or **kwargs", definition.lineno
    if arguments.posonlyargs:
        yield "positional-only parameters (/)", definition.lineno


def _odd_key(key: ast.expr | None) -> bool:
    return key is None or (isinstance(key, ast.Constant) and not isinstance(key.value, str))


def _in_message(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    inside: ast.AST | None = node
    while inside is not None:
        if isinstance(inside, ast.Assert):
            return True
        # A name is what allocations and instructions may carry into the profiler.
        if isinstance(inside, ast.keyword) and inside.arg == "name":
            return True
        inside = parents.get(inside)
    return False


def _globals_of(definition: ast.FunctionDef, function: Any) -> Iterator[tuple[str, Any]]:
    """Global names that a function's body reads, with their values."""
    local = {a.arg for a in (*definition.args.args, *definition.args.kwonlyargs)}
    names = {
        n.id for s in definition.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
    scope = inspect.unwrap(function).__globals__ if hasattr(function, "__globals__") else {}
    closure = inspect.getclosurevars(function).nonlocals if isinstance(function, types.FunctionType) else {}
    for name in sorted(names - local):
        if name in closure:
            yield name, closure[name]
        elif name in scope:
            yield name, scope[name]
