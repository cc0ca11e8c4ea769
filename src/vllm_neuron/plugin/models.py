"""The model that a configuration serves."""

from typing import TYPE_CHECKING

from vllm_neuron.kv_cache.fp8 import limit_of
from vllm_neuron.models.fp8_cache import with_fp8_cache
from vllm_neuron.models.model import Model
from vllm_neuron.models.registry import build_model
from vllm_neuron.plugin.hardware import compile_target
from vllm_neuron.plugin.settings import resolved_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def served_model(vllm_config: "VllmConfig") -> Model:
    """The model of a configuration, with the KV cache that it asks for. Reads no weight.

    Raises:
        UnsupportedModelError: it is none of ours, or asks for something that is not there.
        RuntimeError: the devices of this machine are of no known kind.
    """
    config = resolved_config(vllm_config)
    model = build_model(vllm_config.model_config.hf_text_config, config.max_model_len)
    return with_fp8_cache(model, limit_of(compile_target(config).platform)) if config.fp8_kv_cache else model
