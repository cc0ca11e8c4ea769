"""A graph's source as a program of C++ calls, which runs without Python (see kernels/cpu/program.h).

The source is called once, with places instead of tensors and operators that note how they are called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_neuron.routes import native_code
from vllm_neuron.routes.native_code import FlatStep

_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""Memory formats as C++ numbers them (c10::MemoryFormat); they have no value of their own in TorchScript."""


@dataclass(frozen=True)
class _Value:
    """What stands for a tensor while a source is read."""

    recorder: "_Recorder"
    place: int
    item: int | None = None

    def __getitem__(self, item: int) -> "_Value":
        return _Value(self.recorder, self.place, item)

    def clone(self) -> "_Value":
        return self.recorder.call(torch.ops.aten.clone.default, self)

    def named(self) -> torch.ScriptObject:
        """The place as an argument of a C++ call."""
        return torch.classes.vllm_neuron_cpu.Place(self.place, self.item)


@dataclass(frozen=True)
class _Call:
    """A call of an operator with the places that it takes and those that it fills."""

    operator: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    taken: frozenset[int]
    filled: range


class _Recorder:
    """Notes calls in their order.

    Args:
        given: places that are filled before the first one.
    """

    def __init__(self, given: int) -> None:
        self.given = given
        self.calls: list[_Call] = []

    def call(self, operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Note a call; returns what stands for its results."""
        schema = operator._schema
        rest = [kwargs.get(declared.name, declared.default_value) for declared in schema.arguments[len(args) :]]
        taken: set[int] = set()
        arguments = tuple(self._argument(value, taken) for value in (*args, *rest))
        first = self.calls[-1].filled.stop if self.calls else self.given
        filled = range(first, first + len(schema.returns))
        self.calls.append(_Call(operator, arguments, frozenset(taken), filled))
        values = tuple(_Value(self, place) for place in filled)
        return values[0] if len(values) == 1 else values

    def dropped(self, kept: set[int]) -> list[list[int]]:
        """For each call the places that nothing uses after it. What is given stays where it is."""
        found = []
        seen = kept | set(range(self.given))
        for call in reversed(self.calls):
            last = {*call.taken, *call.filled} - seen
            seen |= last
            found.append(sorted(last))
        return found[::-1]

    def _argument(self, value: Any, taken: set[int]) -> Any:
        match value:
            case _Value():
                taken.add(value.place)
                return value.named()
            case list() | tuple():
                return tuple(self._argument(item, taken) for item in value)
            case torch.memory_format():
                return _FORMATS[value]
        return value


def load(source: str, given: tuple[int, int, int]) -> FlatStep:
    """The step that a source describes, as a program. The C++ kernels have to be registered.

    Args:
        source: of `native_code.emit`.
        given: how many weights, tensors of KV cache and inputs the step takes.

    Raises:
        ValueError: see `native_code.load`.
    """
    recorder = _Recorder(sum(given))
    values = [_Value(recorder, place) for place in range(sum(given))]
    weights, kv = given[:2]
    step: Callable[..., Sequence[_Value]] = native_code.load(source, recorder.call)  # type: ignore[assignment]
    results = step(values[:weights], values[weights : weights + kv], values[weights + kv :])
    kept = [value.named() for value in results]
    program = torch.classes.vllm_neuron_cpu.Program()
    for call, dropped in zip(recorder.calls, recorder.dropped({value.place for value in results}), strict=True):
        schema = call.operator._schema
        program.call(schema.name, schema.overload_name, call.arguments, dropped)

    def run(
        weights: Sequence[torch.Tensor], kv_cache: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(program.run([*weights, *kv_cache, *inputs], kept))

    return run
