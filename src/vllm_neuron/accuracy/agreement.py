"""How far two sets of next-token scores agree.

Shape letters: T positions, V vocabulary.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

Scores = Mapping[Hashable, float]
"""Log probabilities of the most likely tokens at one position, by token id or text."""


@dataclass(frozen=True)
class LogitErrors:
    """Differences of logits from the truth.

    Attributes:
        rms: root of the mean squared difference.
        p99: 99th percentile of the absolute difference.
        max: largest absolute difference.
        top1: share of positions whose most likely token is the same.
        topk: mean share of the k most likely tokens that both have.
        kl_mean: mean over positions of KL(truth || ours), in nats.
        kl_max: the largest.
    """

    rms: float
    p99: float
    max: float
    top1: float
    topk: float
    kl_mean: float
    kl_max: float


def logit_errors(logits: torch.Tensor, truth: torch.Tensor, k: int) -> LogitErrors:
    """Errors of logits [T, V] against the truth [T, V]."""
    ours, exact = logits.double(), truth.double()
    difference = (ours - exact).abs()
    kl = kl_divergence(exact, ours)
    # torch.quantile refuses more than 2**24 numbers.
    p99 = difference.flatten().kthvalue(max(1, round(0.99 * difference.numel()))).values
    return LogitErrors(
        rms=float(difference.square().mean().sqrt()),
        p99=float(p99),
        max=float(difference.max()),
        top1=float((ours.argmax(-1) == exact.argmax(-1)).double().mean()),
        topk=float(top_overlap(ours, exact, k).mean()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
    )


def kl_divergence(truth: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """KL(softmax(truth) || softmax(ours)) per position in nats, for logits [T, V] both: [T]."""
    log_p, log_q = truth.log_softmax(-1), ours.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)


def top_overlap(ours: torch.Tensor, truth: torch.Tensor, k: int) -> torch.Tensor:
    """Per position the share of the k most likely tokens that both have, for logits [T, V]: [T]."""
    first, second = ours.topk(k, -1).indices, truth.topk(k, -1).indices
    return (first.unsqueeze(-1) == second.unsqueeze(-2)).any(-1).double().mean(-1)


@dataclass(frozen=True)
class ScoreAgreement:
    """How far the scores of two servers agree, of which each gives its most likely tokens only.

    Attributes:
        positions: compared.
        top1: share of positions whose most likely token is the same.
        topk: mean share of the k most likely tokens that both have.
        max_difference: largest difference of a token's log probability, of tokens that both name.
        kl_mean: mean of a lower bound of the KL divergence, in nats; see `kl_of_top`.
        kl_max: the largest.
        first_difference: the first position where the most likely token differs, or None.
        worst: the position of the largest divergence.
    """

    positions: int
    top1: float
    topk: float
    max_difference: float
    kl_mean: float
    kl_max: float
    first_difference: int | None
    worst: int


def score_agreement(truth: Sequence[Scores], ours: Sequence[Scores]) -> ScoreAgreement:
    """Agreement of two lists of scores, a position each.

    Raises:
        ValueError: no positions, different numbers of them, or a position where the two name no token in common.
    """
    if not truth or len(truth) != len(ours):
        raise ValueError(f"scores of {len(truth)} and {len(ours)} positions cannot be compared")
    differs = [_best(a) != _best(b) for a, b in zip(truth, ours, strict=True)]
    divergences = [kl_of_top(a, b) for a, b in zip(truth, ours, strict=True)]
    overlaps = [len(a.keys() & b.keys()) / min(len(a), len(b)) for a, b in zip(truth, ours, strict=True)]
    gaps = [abs(a[token] - b[token]) for a, b in zip(truth, ours, strict=True) for token in a.keys() & b.keys()]
    if not all(overlaps):
        raise ValueError(f"position {overlaps.index(0)}: the two sides name no token in common")
    return ScoreAgreement(
        positions=len(truth),
        top1=1 - sum(differs) / len(differs),
        topk=sum(overlaps) / len(overlaps),
        max_difference=max(gaps),
        kl_mean=sum(divergences) / len(divergences),
        kl_max=max(divergences),
        first_difference=differs.index(True) if any(differs) else None,
        worst=divergences.index(max(divergences)),
    )


def kl_of_top(truth: Scores, ours: Scores) -> float:
    """A lower bound of KL(truth || ours) in nats: of the tokens that both name, and of all others as one.

    Merging outcomes never raises a divergence (the data processing inequality).
    """
    common = truth.keys() & ours.keys()
    pairs = [(math.exp(truth[token]), math.exp(ours[token])) for token in common]
    rest = tuple(max(1 - sum(side), 1e-12) for side in zip(*pairs, strict=True)) if pairs else (1.0, 1.0)
    return max(0.0, sum(p * (math.log(p) - math.log(max(q, 1e-300))) for p, q in [*pairs, rest] if p > 0))


def _best(scores: Scores) -> Hashable:
    return max(scores, key=lambda token: scores[token])
