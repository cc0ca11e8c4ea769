"""Architectures that other packages bring, found by entry point.

A package declares each with a name of Hugging Face's and the function that builds it, in its pyproject.toml:

    [project.entry-points."vllm_neuron.models"]
    HeliumForCausalLM = "vllm_neuron_helium:build"

Only the package whose architecture a config.json names is imported.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vllm_neuron.models.errors import ModelPackageError
from vllm_neuron.models.model import Model

ENTRY_POINT_GROUP = "vllm_neuron.models"

ModelBuilder = Callable[[Any, int | None], Model]
"""(hf_config, max_model_len) -> the model. It reads no weight, and raises UnsupportedModelError for a configuration
that it does not cover."""


def external_architectures() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Each architecture that an installed package declares, with every entry point that declares it."""
    found: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        found[entry_point.name].append(entry_point)
    return {name: tuple(declared) for name, declared in sorted(found.items())}


def external_builder(architecture: str, declared: tuple[EntryPoint, ...]) -> ModelBuilder:
    """The function that the one package which declares `architecture` gives.

    Raises:
        ModelPackageError: several packages declare it, or its function cannot be imported.
    """
    if len(declared) > 1:
        packages = ", ".join(sorted(_package(entry_point) for entry_point in declared))
        raise ModelPackageError(f"{architecture} is declared by several packages: {packages}. Uninstall all but one.")
    (entry_point,) = declared
    try:
        function = entry_point.load()
    except Exception as error:
        raise ModelPackageError(
            f"{architecture} is declared by {_package(entry_point)} as {entry_point.value}, which cannot be imported: "
            f"{type(error).__name__}: {error}. Correct or uninstall that package."
        ) from error

    def build(hf_config: Any, max_model_len: int | None) -> Model:
        model = function(hf_config, max_model_len)
        if not isinstance(model, Model):
            raise ModelPackageError(
                f"{entry_point.value} of {_package(entry_point)} gave a {type(model).__name__} for {architecture}: it "
                "must return a vllm_neuron.models.model.Model. Correct or uninstall that package."
            )
        return model

    return build


def _package(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unnamed package"
