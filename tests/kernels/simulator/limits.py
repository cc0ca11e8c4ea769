"""What kernels that break one limit each are written with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import nki.language as nl


class Case(NamedTuple):
    kernel: Callable[..., Any]
    instruction: str
    rule: str
    target: str


CASES: list[Case] = []


def breaks(instruction: str, rule: str, target: str = "trn2") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(kernel, instruction, rule, target))
        return kernel

    return register


def sb(shape, dtype="float32"):
    """A tile in SBUF full of 1."""
    return nl.ones(shape, dtype)


def ps(shape, dtype="float32"):
    """An uninitialised tile in PSUM."""
    return nl.ndarray(shape, dtype, nl.psum)


def filled(shape, dtype="float32"):
    """A tile in PSUM full of 1."""
    return nl.ones(shape, dtype, nl.psum)


def hbm(shape, dtype="float32"):
    """A tensor in HBM full of 1."""
    return nl.ones(shape, dtype, nl.hbm)
