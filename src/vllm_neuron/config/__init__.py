"""The configuration: options, their validation, and the one resolution that everything else reads."""

from vllm_neuron.config.faults import ConfigurationError, Fault
from vllm_neuron.config.options import EncoderNeuronConfig, NeuronConfig, OnDeviceSamplingConfig
from vllm_neuron.config.report import effective_report
from vllm_neuron.config.resolution import log_notices, resolve
from vllm_neuron.config.resolved import EffectiveOption, Notice, ResolvedConfig
from vllm_neuron.config.settings import ServingSettings

__all__ = [
    "ConfigurationError",
    "EffectiveOption",
    "EncoderNeuronConfig",
    "Fault",
    "NeuronConfig",
    "Notice",
    "OnDeviceSamplingConfig",
    "ResolvedConfig",
    "ServingSettings",
    "effective_report",
    "log_notices",
    "resolve",
]
