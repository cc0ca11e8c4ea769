"""Straight-line Python source of a graph: one call of a preselected operator per line.

The source is all there is to a compiled graph on the CPU. It is text, so it can be printed, hashed, saved and loaded,
and it has no guards, no dispatch on modules and no trees: only operators in order, each tensor dropped after its last
use.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

FlatStep = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
"""(weights, KV cache, inputs), all flat -> flat outputs. The KV cache is updated in place."""


def emit(graph: fx.Graph, num_weights: int, num_kv: int, device: str = "cpu") -> str:
    """Source of a module with the operators of the graph and a function `step` (a `FlatStep`).

    Args:
        graph: placeholders are the weights, the KV cache, the inputs; what it returns is a list of outputs.
        num_weights: how many of the placeholders are weights.
        num_kv: how many are KV cache.
        device: where tensors that the graph itself makes are to be, whatever it was captured on.
    """
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    groups = arguments[:num_weights], arguments[num_weights : num_weights + num_kv], arguments[num_weights + num_kv :]
    names = {
        node: f"{letter}{index}"
        for letter, group in zip(("w", "kv", "x"), groups, strict=True)
        for index, node in enumerate(group)
    }
    operators: dict[str, str] = {}
    body = [
        f"({' '.join(f'{names[node]},' for node in group)}) = {source}"
        for group, source in zip(groups, ("weights", "kv_cache", "inputs"), strict=True)
        if group
    ]
    last_uses = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            names[node] = node.name
            body.append(f"{node.name} = {_call(node, names, operators)}")
        elif node.op == "output":
            body.append(f"return ({' '.join(f'{_owned(value, names)},' for value in node.args[0])})")
        dropped = [names[used] for used in last_uses.get(node, ()) if used.op == "call_function"]
        if dropped and node.op != "output":
            body.append(f"del {', '.join(dropped)}")
    lines = ["import torch", "from math import inf, nan", "", f"device = torch.device({device!r})"]
    lines += [f"{name} = {source}" for name, source in sorted(operators.items())]
    lines += ["", "", "def step(weights, kv_cache, inputs):", *(f"    {line}" for line in body)]
    return "\n".join(lines) + "\n"


def load(source: str, call: Callable[..., Any] | None = None) -> FlatStep:
    """The function that `emit` wrote.

    Args:
        source: its text.
        call: is called with each operator and its arguments in place of the operator.

    Raises:
        ValueError: the source is damaged, or an operator it uses does not exist in this process.
    """
    module: dict[str, Any] = {}
    try:
        exec(compile(source, "<compiled graph>", "exec"), module)
        if call is not None:
            found = {name: value for name, value in module.items() if isinstance(value, torch._ops.OpOverload)}
            module.update({name: partial(call, value) for name, value in found.items()})
        return module["step"]
    except (SyntaxError, AttributeError, KeyError, RuntimeError) as error:
        raise ValueError(f"the source of the graph does not load: {error}") from error


def namespaces(graph: fx.Graph) -> set[str]:
    """Namespaces of the operators that a graph calls, such as "aten"."""
    return {node.target.namespace for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Per node, the nodes that nothing after it uses; a result that nobody uses dies where it is made."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for used in (*node.all_input_nodes, node):
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found


def _call(node: fx.Node, names: dict[fx.Node, str], operators: dict[str, str]) -> str:
    if node.target is operator.getitem:
        source, index = node.args
        return f"{_text(source, names)}[{_text(index, names)}]"
    if not isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"the graph calls {node.target}, which is no operator")
    space, name = node.target._schema.name.split("::")
    overload = node.target._overloadname
    alias = "_".join((space, name, *([] if overload == "default" else [overload])))
    operators[alias] = f"torch.ops.{space}.{name}.{overload}"
    values = [_text(value, names) for value in node.args]
    values += [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
    return f"{alias}({', '.join(values)})"


def _owned(value: fx.Node, names: dict[fx.Node, str]) -> str:
    """A result; one that is an argument itself would change when the caller fills its buffers again."""
    return f"{names[value]}.clone()" if value.op == "placeholder" else names[value]


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    match value:
        case fx.Node():
            return names[value]
        case list() | tuple():
            return f"[{', '.join(_text(item, names) for item in value)}]"
        case torch.device():
            return "device"
        case float() if not math.isfinite(value):
            return f"-{abs(value)}" if value < 0 else str(value)
        case None | bool() | int() | float() | str() | torch.dtype() | torch.layout() | torch.memory_format():
            return repr(value)
    raise ValueError(f"the graph holds a {type(value).__name__}, which has no source")
