"""Short forms for the tests of the configuration."""

from typing import Any

from vllm_neuron.config import ConfigurationError, Fault, ResolvedConfig, ServingSettings, resolve

NEURON = "additional_config.neuron_config"
ENCODER = "additional_config.encoder_neuron_config"


def settings(**changes: Any) -> ServingSettings:
    """A small Llama; every limit is the user's own unless changed."""
    values = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "architectures": ("LlamaForCausalLM",),
        "block_size": 32,
    }
    return ServingSettings(**{**values, **changes})


def resolved(neuron: Any = None, env: dict[str, str] | None = None, **changes: Any) -> ResolvedConfig:
    return resolve(settings(**changes), {"neuron_config": neuron or {}}, env or {})


def faults(additional_config: Any, env: dict[str, str] | None = None, **changes: Any) -> list[Fault]:
    """The faults of a configuration; none if it is fine."""
    try:
        resolve(settings(**changes), additional_config, env or {})
    except ConfigurationError as error:
        return list(error.faults)
    return []


def only_fault(additional_config: Any, env: dict[str, str] | None = None, **changes: Any) -> Fault:
    found = faults(additional_config, env, **changes)
    assert len(found) == 1, [str(fault) for fault in found]
    return found[0]
