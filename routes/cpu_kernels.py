"""What both routes know of the C++ kernels in graphs of CPU mode: whether there are any, and how they come here."""

import ctypes
from importlib import import_module
from typing import Any

import torch

from vllm_neuron import envs
from vllm_neuron.kernels.cpu import NAMESPACE, build


def named_in(text: str) -> bool:
    """Whether a graph's text calls C++ kernels."""
    return NAMESPACE in text


def packages(text: str) -> tuple[str, ...]:
    """Packages whose sources decide what the C++ kernels do that a graph's text calls."""
    return (build.__package__,) if named_in(text) else ()


def register() -> None:
    """Make the kernels operators of torch, after building them if no process did before.

    Raises:
        KernelBuildError: they cannot be built.
    """
    import_module("vllm_neuron.kernels.cpu.ops")


def custom_call() -> Any:
    """The C function that computes any of the kernels as a custom call of XLA; see kernels/cpu/custom_call.h."""
    register()
    return ctypes.CDLL(str(build.load())).vllm_neuron_cpu_call


def raise_failure() -> None:
    """Raise what went wrong in a custom call since the last time.

    Raises:
        RuntimeError: something did.
    """
    if failure := torch.ops.vllm_neuron_cpu.take_failure():
        raise RuntimeError(failure)


def fault() -> str | None:
    """Why graphs cannot have the kernels that the configuration asks for, with the remedy; None if they can."""
    return None if envs.VLLM_NEURON_DISABLE_NKI_KERNELS else build.fault()


def in_use() -> str:
    """What computes the operations of a graph."""
    return "torch twins" if envs.VLLM_NEURON_DISABLE_NKI_KERNELS else "C++ kernels"
