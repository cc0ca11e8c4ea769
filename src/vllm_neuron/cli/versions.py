"""Which versions of the packages that matter are installed, and whether they are the real ones."""

from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

RUNTIME = ("vllm-neuron", "vllm", "torch", "torch-xla", "jax", "jaxlib", "transformers")
NEURON = ("torch-neuronx", "neuronx-cc", "nki")
"""Packages of the extra "neuron". They come from AWS's package index; PyPI only has empty ones of the same names."""


@dataclass(frozen=True)
class Package:
    """A package as it is installed.

    Attributes:
        name: of the distribution.
        version: None when it is not installed.
        stub: it is installed, but is PyPI's empty placeholder.
    """

    name: str
    version: str | None
    stub: bool = False


def package(name: str) -> Package:
    """What is installed under a distribution's name."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return Package(name, None)
    return Package(name, found.version, name in NEURON and _is_stub(found))


def _is_stub(found: Distribution) -> bool:
    """A placeholder holds one Python file; the real packages hold hundreds."""
    return sum(path.suffix in (".py", ".so") for path in found.files or ()) <= 1
