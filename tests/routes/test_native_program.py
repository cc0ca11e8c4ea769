"""Programs of C++ calls do what the source does that they are made of."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_neuron.routes import cpu_kernels, native_code, native_program

X = torch.arange(24.0).view(4, 6) - 11
INDEX = torch.tensor([2, 0])


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    cpu_kernels.register()


def source_of(step: Callable[..., Any], inputs: int) -> str:
    """What `emit` writes for a function of tensors."""
    graph = torch.fx.Graph()
    places = [graph.placeholder(f"x{index}") for index in range(inputs)]
    graph.output(step(lambda operator, *args, **kwargs: graph.call_function(operator, args, kwargs), *places))
    return native_code.emit(graph, 0, 0)


ATEN = torch.ops.aten
STEPS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "a number as a tensor keeps the dtype": (
        lambda call, x: [call(ATEN.mul.Tensor, x, 1.5)],
        (X.bfloat16(),),
    ),
    "a dtype, a keyword and defaults": (
        lambda call, x: [
            call(ATEN._to_copy.default, x, dtype=torch.bfloat16),
            call(ATEN.sum.dim_IntList, x, [1], True),
        ],
        (X,),
    ),
    "a list of tensors": (lambda call, x, y: [call(ATEN.cat.default, [x, y, x], 1)], (X, -X)),
    "a list of tensors and None": (lambda call, x, i: [call(ATEN.index.Tensor, x, [None, i])], (X, INDEX)),
    "an empty list": (lambda call, x: [call(ATEN.view.default, call(ATEN.max.default, x), [])], (X,)),
    "several results": (lambda call, x: _both(call(ATEN.max.dim, x, 1)), (X,)),
    "a list of results": (lambda call, x: _both(call(ATEN.split.Tensor, x, 3, 1)), (X,)),
    "an item of a list as an argument": (
        lambda call, x: [call(ATEN.neg.default, _both(call(ATEN.split.Tensor, x, 3, 1))[1])],
        (X,),
    ),
    "an int where a float is declared": (lambda call, x: [call(ATEN.leaky_relu.default, x, 2)], (X,)),
    "infinity": (lambda call, x: [call(ATEN.clamp.default, x, float("-inf"), 3)], (X,)),
    "a memory format": (
        lambda call, x: [call(ATEN.clone.default, call(ATEN.t.default, x), memory_format=torch.contiguous_format)],
        (X,),
    ),
    "channels last": (
        lambda call, x: [call(ATEN.clone.default, x, memory_format=torch.channels_last)],
        (X.view(1, 4, 2, 3),),
    ),
    "a device": (
        lambda call, x: [call(ATEN.add.Tensor, x, call(ATEN.arange.default, 6, device=torch.device("cpu")))],
        (X,),
    ),
    "a result that nobody uses": (lambda call, x: [call(ATEN.neg.default, x), call(ATEN.abs.default, x)][:1], (X,)),
    "a result returned twice and used later": (
        lambda call, x: [y := call(ATEN.neg.default, x), call(ATEN.abs.default, y), y],
        (X,),
    ),
}


def _both(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [node.graph.call_function(operator.getitem, (node, index)) for index in range(2)]


@pytest.mark.parametrize("name", STEPS)
def test_a_program_returns_what_its_source_does(name: str) -> None:
    step, inputs = STEPS[name]
    source = source_of(step, len(inputs))
    expected = native_code.load(source)([], [], inputs)
    run = native_program.load(source, (0, 0, len(inputs)))
    for _ in range(2):
        found = run([], [], inputs)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
            assert torch.equal(ours, theirs)


def test_a_returned_argument_is_a_copy() -> None:
    inputs = [torch.ones(3)]
    (found,) = native_program.load(source_of(lambda call, x: [x], 1), (0, 0, 1))([], [], inputs)
    inputs[0].zero_()
    assert found.tolist() == [1.0] * 3


def test_weights_cache_and_inputs_come_in_their_order() -> None:
    source = "def step(weights, kv_cache, inputs):\n    return (inputs[0], weights[1], kv_cache[0],)\n"
    run = native_program.load(source, (2, 1, 1))
    given = [torch.tensor(number) for number in range(4)]
    assert [int(value) for value in run(given[:2], given[2:3], given[3:])] == [3, 1, 2]


def test_what_fails_in_an_operator_is_raised_and_the_program_stays_usable() -> None:
    kernel = torch.ops.vllm_neuron_cpu.embedding.default
    run = native_program.load(source_of(lambda call, ids, table: [call(kernel, ids, table)], 2), (0, 0, 2))
    with pytest.raises(IndexError, match="token id 9 of a vocabulary of 4"):
        run([], [], [torch.tensor([9]).int(), X])
    (found,) = run([], [], [torch.tensor([1]).int(), X])
    assert torch.equal(found, X[1:2])


def test_results_are_freed_after_their_last_use() -> None:
    def chain(call: Callable[..., Any], x: torch.fx.Node) -> list[torch.fx.Node]:
        for _ in range(20):
            x = call(ATEN.neg.default, x)
        return [x]

    x = torch.ones(2**24)
    run = native_program.load(source_of(chain, 1), (0, 0, 1))
    peak = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    peak[0].write_text("5")
    before = _kib(peak[1].read_text())
    run([], [], [x])
    assert _kib(peak[1].read_text()) - before < 4 * x.nbytes / 1024


def _kib(status: str) -> int:
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
