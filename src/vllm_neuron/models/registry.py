"""The architectures there are, by Hugging Face's names: ours, and those of other packages."""

from collections.abc import Mapping
from typing import Any

from vllm_neuron.models import llama, mistral, qwen2, qwen3
from vllm_neuron.models.errors import ModelPackageError, UnsupportedArchitectureError
from vllm_neuron.models.external import ModelBuilder, external_architectures, external_builder
from vllm_neuron.models.model import Model
from vllm_neuron.weights.quantized import refuse_quantized

ARCHITECTURES: Mapping[str, ModelBuilder] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}

ONBOARDING_GUIDE = "docs/onboarding-models.md"


def build_model(hf_config: Any, max_model_len: int | None = None) -> Model:
    """The model that a Hugging Face configuration names in `architectures`. Reads no weight.

    Args:
        hf_config: a transformers configuration of a text model.
        max_model_len: longest sequence that will be served; None is the model's own maximum.

    Raises:
        UnsupportedArchitectureError: none of the named architectures is one of ours or of an installed package.
        ModelPackageError: the package that declares the architecture cannot be used.
        UnsupportedModelError: the architecture is there, but not with this configuration.
        QuantizedCheckpointError: the checkpoint is quantized.
    """
    builder = _builder(list(getattr(hf_config, "architectures", None) or []))
    refuse_quantized(hf_config)
    return builder(hf_config, max_model_len)


def _builder(names: list[str]) -> ModelBuilder:
    external = external_architectures()
    for name in names:
        if name in ARCHITECTURES and name in external:
            values = ", ".join(entry_point.value for entry_point in external[name])
            raise ModelPackageError(f"{name} is declared by {values}, but it is built in. Uninstall that package.")
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
        if name in external:
            return external_builder(name, external[name])
    given = f"architecture {', '.join(names)}" if names else "a config.json that names no architecture"
    supported = ", ".join(sorted({*ARCHITECTURES, *external}))
    raise UnsupportedArchitectureError(
        f"not supported yet: {given} (supported: {supported}; {ONBOARDING_GUIDE} says how to add one)"
    )
