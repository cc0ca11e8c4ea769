"""The architectures there are, by Hugging Face's names."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_neuron.models import llama, qwen2, qwen3
from vllm_neuron.models.errors import UnsupportedArchitectureError
from vllm_neuron.models.model import Model
from vllm_neuron.weights.quantized import refuse_quantized

ARCHITECTURES: Mapping[str, Callable[[Any, int | None], Model]] = {
    "LlamaForCausalLM": llama.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}


def build_model(hf_config: Any, max_model_len: int | None = None) -> Model:
    """The model that a Hugging Face configuration names in `architectures`. Reads no weight.

    Args:
        hf_config: a transformers configuration of a text model.
        max_model_len: longest sequence that will be served; None is the model's own maximum.

    Raises:
        UnsupportedArchitectureError: none of the named architectures is one of ours.
        UnsupportedModelError: the architecture is ours, but not with this configuration.
        QuantizedCheckpointError: the checkpoint is quantized.
    """
    names = list(getattr(hf_config, "architectures", None) or [])
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        given = f"architecture {', '.join(names)}" if names else "a config.json that names no architecture"
        raise UnsupportedArchitectureError(
            f"not supported yet: {given} (supported: {', '.join(sorted(ARCHITECTURES))})"
        )
    refuse_quantized(hf_config)
    return ARCHITECTURES[known[0]](hf_config, max_model_len)
