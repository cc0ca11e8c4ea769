"""Sampling inside a compiled graph, and the random numbers that it takes as inputs."""

from vllm_neuron.kernels.mask_logits_torch import mask_logits
from vllm_neuron.sampling.masks import ALLOW_ALL, mask_of, mask_words
from vllm_neuron.sampling.on_device import (
    GREEDY_BELOW,
    MAX_LOGPROBS,
    GreedyInputs,
    Sampled,
    SampledWithLogprobs,
    SamplingInputs,
    pick_greedily,
    sample,
)
from vllm_neuron.sampling.uniforms import Uniforms

__all__ = [
    "ALLOW_ALL",
    "GREEDY_BELOW",
    "MAX_LOGPROBS",
    "GreedyInputs",
    "Sampled",
    "SampledWithLogprobs",
    "SamplingInputs",
    "Uniforms",
    "mask_logits",
    "mask_of",
    "mask_words",
    "pick_greedily",
    "sample",
]
