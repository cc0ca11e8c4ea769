"""What makes a function an instruction."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm_neuron.kernels.simulator.errors import Broken, Violation, kernel_line
from vllm_neuron.kernels.simulator.isa.constants import engine
from vllm_neuron.kernels.simulator.machine import current, describe
from vllm_neuron.kernels.simulator.memory import Traced


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of (machine, operands) one of (operands) that runs on the current core.

    A rule that it breaks is raised as Violation, with the instruction, its operands and the kernel's line.
    """
    full = inspect.signature(function)
    signature = full.replace(parameters=list(full.parameters.values())[1:])

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        machine = current()
        if not machine.strict and "dtype" in kwargs and "dtype" not in signature.parameters:
            # NKI 0.2 still took the destination's type.
            machine.notes[f"{function.__name__}: dtype is no parameter any more"] += 1
            del kwargs["dtype"]
        outer, machine.instruction = machine.instruction, function.__name__
        try:
            return function(machine, *args, **kwargs)
        except Traced:
            return None
        except Broken as broken:
            operands = describe(signature.bind(*args, **kwargs).arguments)
            raise Violation(function.__name__, str(broken), operands, kernel_line()) from None
        finally:
            machine.instruction = outer

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def chosen(given: engine, default: engine, allowed: tuple[engine, ...]) -> engine:
    """The engine an instruction runs on.

    Raises:
        Broken: it cannot run on the one that was given.
    """
    if given is engine.unknown:
        return default
    if given not in allowed:
        raise Broken(f"runs on {' or '.join(e.name for e in allowed)}, not on {given.name}")
    return given
