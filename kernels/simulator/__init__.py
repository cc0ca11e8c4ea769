"""A simulator for NKI kernels that holds them to the documented limits of the hardware.

    from vllm_neuron.kernels import simulator

    simulator.install()             # `import nki` finds the simulator where the Neuron SDK is not installed
    import nki
    outputs = nki.simulate(kernel)(*arrays)

It runs kernels as Python on NumPy, instruction after instruction. What it enforces and what it cannot know is in
docs/nki-simulator.md; timings it gives are estimates from documented formulas, never measurements.
"""

import importlib.util
import sys
import types

from vllm_neuron.kernels.simulator import dtypes, frontend, isa, language, tensor
from vllm_neuron.kernels.simulator.errors import NkiValidationError, Violation
from vllm_neuron.kernels.simulator.frontend import Kernel, jit, simulate
from vllm_neuron.kernels.simulator.isa import constants
from vllm_neuron.kernels.simulator.run import Run, run

__all__ = ["Kernel", "NkiValidationError", "Run", "Violation", "install", "installed", "jit", "run", "simulate"]


def _missing(module: types.ModuleType) -> types.ModuleType:
    """A module whose every name says that it is not simulated."""

    def absent(name: str) -> object:
        raise AttributeError(f"{module.__name__}.{name} is not simulated")

    module.__getattr__ = absent  # type: ignore[method-assign]
    return module


def _modules(root: str) -> dict[str, types.ModuleType]:
    typing = types.ModuleType(f"{root}.typing")
    typing.tensor = tensor.NkiTensor  # type: ignore[attr-defined]
    found = {
        root: frontend,
        f"{root}.language": language,
        f"{root}.isa": isa,
        f"{root}.isa.constants": constants,
        f"{root}.typing": typing,
        f"{root}.tensor": tensor,
        f"{root}.dtype": types.ModuleType(f"{root}.dtype"),
        f"{root}.compiler": _missing(types.ModuleType(f"{root}.compiler")),
        f"{root}.collectives": _missing(types.ModuleType(f"{root}.collectives")),
    }
    for name in dtypes.DTYPES:
        setattr(found[f"{root}.dtype"], name, name)
    return found


def real_package() -> bool:
    """Whether the nki package of the Neuron SDK is installed (the one on PyPI of that name is an empty stub)."""
    if sys.modules.get("nki") is frontend:
        return False
    try:
        return importlib.util.find_spec("nki.isa") is not None
    except (ImportError, ValueError):
        return False


def installed() -> bool:
    """Whether `import nki` gives the simulator."""
    return sys.modules.get("nki") is frontend


def install() -> bool:
    """Register the simulator as `nki`, `nki.language` and `nki.isa` where the real package is absent.

    Returns:
        Whether the simulator is what `import nki` gives now.
    """
    if installed():
        return True
    if real_package():
        return False
    for name, module in _modules("nki").items():
        sys.modules[name] = module
        if name.count(".") == 1:
            setattr(frontend, name.split(".")[1], module)
    return True
