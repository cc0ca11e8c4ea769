"""The on-device sampler: a pure function of tensors at the end of a graph.

Shape letters: B rows, V vocabulary, C candidates (at most MAX_CANDIDATES), N = MAX_LOGPROBS.
"""

from typing import NamedTuple

import torch

from vllm_neuron.config.options import MAX_CANDIDATES
from vllm_neuron.kernels.dispatch import implementation

GREEDY_BELOW = 1e-5
"""Temperatures below this one are greedy, as in vLLM."""

MAX_LOGPROBS = 20
"""Most logprobs of a token that a graph returns: vLLM's own default limit."""


class SamplingInputs(NamedTuple):
    """How each row is to be sampled. A graph takes all of it at every step, so that one serves every mix of rows.

    Attributes:
        temperature: [B] float32; below GREEDY_BELOW a row is greedy, and the next three do not count.
        top_k: [B] int32; 0 and below, and above C, mean all candidates.
        top_p: [B] float32 in (0, 1].
        uniforms: [B] float32 in [0, 1), the random numbers: inputs, because a graph has none of its own.
        mask: [B, ceil(V / 32)] int32 of bits, see `mask_logits_torch`; all ones where a row is free.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniforms: torch.Tensor
    mask: torch.Tensor


class GreedyInputs(NamedTuple):
    """What `pick_greedily` takes: only the mask of `SamplingInputs`."""

    mask: torch.Tensor


class SampledWithLogprobs(NamedTuple):
    """What the sampler returns.

    The logprobs are those of the logits before temperature, top_k and top_p, with the mask applied; where the mask
    leaves fewer than N tokens, the rest have -inf.

    Attributes:
        token_ids: [B] int32.
        logprobs: [B, 1 + N] float32: of the sampled token, then the N largest in order.
        logprob_ids: [B, 1 + N] int32: the tokens they belong to.
        ranks: [B] int32: how many candidates have at least the sampled token's logit; 1 for the most likely.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    logprob_ids: torch.Tensor
    ranks: torch.Tensor


class Sampled(NamedTuple):
    """What `pick_greedily` returns: token_ids [B] int32."""

    token_ids: torch.Tensor


def sample(logits: torch.Tensor, inputs: SamplingInputs, vocab_size: int) -> SampledWithLogprobs:
    """One token for each row of logits [B, V'] float32; columns from ``vocab_size`` on are padding, never sampled.

    As vLLM's sampler does it, for the C largest logits of a row: divide by the temperature; keep those that are not
    below the k-th largest, ties included; of these keep the smallest set of the most probable whose mass reaches top_p,
    which is every token that less than top_p of the mass precedes (arXiv 1904.09751). With top_k = C, which unlimited
    means here, the kept set is the one that vLLM keeps with that top_k. Among the kept tokens, in order of falling
    probability, the uniform number chooses by the inverse of the cumulative distribution.

    Equal logits count in the order of their tokens, the lowest first: a greedy row gets the lowest of the best.
    """
    masked = implementation("mask_logits")(_without_padding(logits, vocab_size), inputs.mask)
    values, ids = implementation("top_k")(masked, min(MAX_CANDIDATES, vocab_size))
    choice = torch.where(inputs.temperature < GREEDY_BELOW, 0, _choose(values, inputs)).unsqueeze(1)
    total = implementation("log_sum_exp")(masked)
    chosen = values.gather(1, choice)
    token_ids = ids.gather(1, choice)
    count = min(MAX_LOGPROBS, vocab_size)
    return SampledWithLogprobs(
        token_ids.squeeze(1),
        torch.cat([chosen, values.narrow(1, 0, count)], dim=1) - total,
        torch.cat([token_ids, ids.narrow(1, 0, count)], dim=1),
        (values >= chosen).sum(dim=1, dtype=torch.int32),
    )


def pick_greedily(logits: torch.Tensor, inputs: GreedyInputs, vocab_size: int) -> Sampled:
    """The most likely token of each row of logits [B, V'] float32 that the mask allows, of equal ones the lowest."""
    masked = implementation("mask_logits")(_without_padding(logits, vocab_size), inputs.mask)
    return Sampled(implementation("argmax")(masked))


def _choose(values: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Which of the candidates [B, C], the largest first, each row gets: [B] int64."""
    count = values.shape[1]
    greedy = inputs.temperature < GREEDY_BELOW
    scaled = values / torch.where(greedy, 1.0, inputs.temperature).unsqueeze(1)
    top_k = torch.where((inputs.top_k <= 0) | (inputs.top_k > count), count, inputs.top_k)
    least = scaled.gather(1, (top_k - 1).long().unsqueeze(1))
    # A softmax whose maximum is known to be the first. ATen's own splits even these few over OpenMP threads.
    weights = torch.where(scaled >= least, (scaled - scaled.narrow(1, 0, 1)).exp(), 0.0)
    probabilities = weights / weights.sum(dim=1, keepdim=True)
    # The mass from a token on, the smallest summed first. It is above 1 - top_p where less than top_p goes before.
    tail = probabilities.flip(1).cumsum(dim=1).flip(1)
    kept = tail > 1 - inputs.top_p.unsqueeze(1)
    mass = torch.where(kept, probabilities, 0.0).cumsum(dim=1)
    passed = mass <= inputs.uniforms.unsqueeze(1) * mass.narrow(1, count - 1, 1)
    # Rounding must not lead past the last token that is kept; the first one always is.
    return torch.minimum(passed.sum(dim=1), kept.sum(dim=1) - 1).clamp(min=0)


def _without_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return logits if logits.shape[1] == vocab_size else logits.narrow(1, 0, vocab_size)
