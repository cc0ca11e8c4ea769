"""`nki`: kernels and how they are run."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm_neuron import envs
from vllm_neuron.kernels.simulator import isa, language
from vllm_neuron.kernels.simulator.machine import running
from vllm_neuron.kernels.simulator.objects import NKIObject
from vllm_neuron.kernels.simulator.run import Run, run
from vllm_neuron.kernels.simulator.tensor import NkiTensor

__all__ = ["Kernel", "NKIObject", "NkiTensor", "cpu_simulate", "isa", "jit", "language", "simulate", "simulate_kernel"]


class Kernel:
    """A kernel: kernel(args), or kernel[lnc](args) on so many cores. Called inside another kernel it is inlined.

    Attributes:
        function: the Python function.
        lnc: cores it runs on.
    """

    def __init__(self, function: Callable[..., Any], lnc: int = 1) -> None:
        functools.update_wrapper(self, function)
        self.function, self.lnc = function, lnc
        self.__signature__ = inspect.signature(function)

    def __getitem__(self, lnc: Any) -> "Kernel":
        return Kernel(self.function, int(lnc[0] if isinstance(lnc, tuple) else lnc))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if running() is not None:
            return self.function(*args, **kwargs)
        if envs.NKI_SIMULATOR:
            return run(self.function, args, kwargs, self.lnc).outputs
        raise RuntimeError(
            f"{self.function.__name__} is a kernel for Neuron devices, and the nki package of the Neuron SDK is "
            "not installed. Run it with nki.simulate(kernel)(*arrays), or set NKI_SIMULATOR=1."
        )


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a function a kernel. Options of the compiler do not matter to the simulator."""
    return functools.partial(jit, **options) if fn is None else fn if isinstance(fn, Kernel) else Kernel(fn)


class Simulated:
    """A kernel that runs in the simulator when it is called.

    Attributes:
        kernel: the kernel.
        strict, target, precise: as in `run`.
    """

    def __init__(
        self, kernel: Any, strict: bool = True, target: str | None = None, precise: bool | None = None
    ) -> None:
        self.kernel: Kernel = jit(kernel)
        self.strict, self.target, self.precise = strict, target, precise

    def __getitem__(self, lnc: Any) -> "Simulated":
        return Simulated(self.kernel[lnc], self.strict, self.target, self.precise)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs).outputs

    def run(self, *args: Any, trace: bool = False, values: bool = True, **kwargs: Any) -> Run:
        """Run it and return everything that is known about the run, its outputs included; options as in `run`."""
        kernel = self.kernel
        return run(kernel.function, args, kwargs, kernel.lnc, self.strict, self.target, self.precise, trace, values)


def simulate(kernel: Any, *, strict: bool = True, target: str | None = None, precise: bool | None = None) -> Simulated:
    """A kernel as a function that runs in the simulator: simulate(kernel)(*arrays), simulate(kernel[2])(*arrays).

    Args:
        kernel: a kernel or a plain function.
        strict: enforce every documented rule of the hardware and of the language; False is the compatible mode for
            kernels that were written against AWS's own simulator.
        target: "trn2" or "trn3"; None reads NEURON_PLATFORM_TARGET_OVERRIDE and falls back to trn2.
        precise: False keeps all float types in float32; None reads NKI_PRECISE_FP.
    """
    return Simulated(kernel, strict, target, precise)


def cpu_simulate(kernel: Any) -> Simulated:
    """simulate in compatible mode, under the name that older test suites use: cpu_simulate(kernel)[lnc](**inputs)."""
    return Simulated(kernel, strict=False)


def simulate_kernel(func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, lnc: int = 1) -> Any:
    """simulate in compatible mode with the arguments as values."""
    return Simulated(func, strict=False)[lnc](*args, **(kwargs or {}))
