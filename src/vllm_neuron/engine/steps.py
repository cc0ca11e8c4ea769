"""The functions that graphs are made of: a model's step, with or without a sampler behind it."""

from functools import partial

import torch

from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.sampled_inputs import FedTokens, SampledInputs
from vllm_neuron.kv_cache.layout import KVCache
from vllm_neuron.models.model import Model
from vllm_neuron.routes.route import Step
from vllm_neuron.sampling import GreedyInputs, Sampled, SampledWithLogprobs, pick_greedily, sample
from vllm_neuron.weights.table import Weights


def step_function(graph: GraphSpec, model: Model) -> Step:
    """(weights, kv_cache, inputs) -> (outputs, kv_cache) of a graph.

    The outputs are `StepOutputs` where the host samples, `SampledWithLogprobs` or `Sampled` where the graph does,
    logits [T, V] for "prompt_logits" and `LayerOutputs` for "layers".
    """
    if graph.kind == "layers":
        return model.layers
    if graph.kind == "prompt_logits":
        return partial(_prompt_logits, model)
    if graph.sampling == "host":
        return model.step
    return partial(_sampled, model, graph.hands_on)


def _prompt_logits(
    model: Model, weights: Weights, kv_cache: KVCache, hidden: torch.Tensor
) -> tuple[torch.Tensor, KVCache]:
    """hidden [T, H] -> logits [T, V] float32; takes and returns a KV cache of no layers."""
    return model.logits(weights, hidden), kv_cache


def _sampled(
    model: Model, hands_on: int, weights: Weights, kv_cache: KVCache, inputs: SampledInputs
) -> tuple[Sampled | SampledWithLogprobs, KVCache]:
    """The step, then a token for each of its B requests; token ids come as [P] for the next step to take them from."""
    step = inputs.step
    if isinstance(inputs.fed, FedTokens):
        step = step._replace(token_ids=_select(step.token_ids, inputs.fed))
    outputs, kv_cache = model.step(weights, kv_cache, step)
    sampled: Sampled | SampledWithLogprobs
    if isinstance(inputs.sampling, GreedyInputs):
        sampled = pick_greedily(outputs.logits, inputs.sampling, model.vocab_size)
    else:
        sampled = sample(outputs.logits, inputs.sampling, model.vocab_size)
    padding = hands_on - sampled.token_ids.shape[0]
    return sampled._replace(token_ids=torch.nn.functional.pad(sampled.token_ids, (0, padding))), kv_cache


def _select(token_ids: torch.Tensor, fed: FedTokens) -> torch.Tensor:
    """Per row the token that an earlier step has sampled, or the one in `token_ids` [B]."""
    sampled = fed.token_ids.index_select(0, fed.rows.clamp(min=0))
    return torch.where(fed.rows >= 0, sampled, token_ids)
