"""Donation of the KV cache: the new cache of a pure graph is written into the memory of the old one.

A functional update such as `index_copy(cache, 0, slots, rows)` copies the whole cache to change a few rows. Where
nothing reads the old cache afterwards, its in-place form gives the same results without the copy.
"""

import operator

import torch
from torch import fx


def donate(name: str, graph: fx.Graph, first: int, count: int) -> None:
    """Update the KV cache in place; afterwards the graph returns its outputs only, and the cache is its arguments.

    Args:
        name: of the graph, for messages.
        graph: changed in place. Its last `count` results are the new cache.
        first: index of the first KV cache argument.
        count: number of KV cache arguments.

    Raises:
        ValueError: the new cache is not the old one with rows written to it, the old one is still read after it was
            written to, or a weight or an input is changed in place.
    """
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    caches = arguments[first : first + count]
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    split = len(results) - count
    for cache, result in zip(caches, results[split:], strict=True):
        for update in _updates(name, cache, result):
            if not _mutates(update):
                _make_in_place(name, graph, update)
    _check_arguments(name, graph, [node for node in arguments if node not in caches])
    output.args = (results[:split],)
    graph.eliminate_dead_code()
    graph.lint()


def _updates(name: str, cache: fx.Node, result: fx.Node) -> list[fx.Node]:
    """The writes between an old cache and a new one, the last first. Views in between change nothing."""
    found = []
    node = result
    while node is not cache:
        if not isinstance(node, fx.Node) or node.op != "call_function":
            raise ValueError(f"{name}: the new KV cache {result} is not made from the old one, {cache}")
        if not _is_view(node):
            if not _mutates(node) and _in_place_form(node) is None:
                raise ValueError(
                    f"{name}: the KV cache {cache} goes through {node.target}, which would copy all of it at every "
                    "step. Write to it with index_copy, index_put or scatter."
                )
            found.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return found


def _make_in_place(name: str, graph: fx.Graph, update: fx.Node) -> None:
    source = update.args[0]
    assert isinstance(source, fx.Node)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for alias in _aliases(source):
        late = [user for user in alias.users if user is not update and order[user] > order[update]]
        if any(user.op == "output" or not _is_view(user) for user in late):
            raise ValueError(
                f"{name}: {late[0]} reads the KV cache as it was before {update}. Read the new cache, or read before "
                "writing: the old one is given away."
            )
    with graph.inserting_before(update):
        in_place = graph.call_function(_in_place_form(update), update.args, update.kwargs)  # type: ignore[arg-type]
    in_place.meta = update.meta
    update.replace_all_uses_with(in_place)
    graph.erase_node(update)


def _aliases(node: fx.Node) -> set[fx.Node]:
    """All views of the memory that `node` is a view of, as far as they show the same state of it."""
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    found = {node}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if _is_view(user) and user not in found:
                found.add(user)
                pending.append(user)
    return found


def _check_arguments(name: str, graph: fx.Graph, protected: list[fx.Node]) -> None:
    aliases = {alias for argument in protected for alias in _aliases(argument)}
    for node in graph.nodes:
        for argument, value in _written(node):
            if value in aliases:
                raise ValueError(
                    f"{name}: {node.target} changes its argument {argument}, which is a weight or an input. Only the "
                    "KV cache may change."
                )


def _written(node: fx.Node) -> list[tuple[str, object]]:
    """(name, value) of every argument that an operator writes to."""
    if not _mutates(node):
        return []
    schema = node.target._schema  # type: ignore[union-attr]
    values = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    return [
        (argument.name, values.get(argument.name))
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    """Whether the result of a node is the memory of its first argument, seen in another way."""
    if node.target is operator.getitem or not isinstance(node.target, torch._ops.OpOverload):
        return False
    arguments = node.target._schema.arguments
    if not arguments or arguments[0].alias_info is None or node.target._schema.is_mutable:
        return node.target is torch.ops.aten._unsafe_view.default
    return True


def _in_place_form(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that does to its first argument what this one does to a copy of it, if there is one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, f"{target._schema.name.split('::')[1]}_", None)
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if overload is None:
        return None
    first = overload._schema.arguments[0].alias_info
    return overload if first is not None and first.is_write else None
