"""Greedy answers of two sides, token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

Scores = Mapping[int, float]
"""Of the most likely tokens at one position: a logit, or a log probability where a server gives no logits."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        token_ids: of the answer.
        scores: at each of its positions; empty where the server does not tell.
    """

    token_ids: tuple[int, ...]
    scores: tuple[Scores, ...]


@dataclass(frozen=True)
class Divergence:
    """The first position at which two answers differ, and how both sides score both tokens.

    NaN stands for a score that a side does not tell, because the token is not among its most likely ones.

    Attributes:
        prompt: index of the prompt.
        position: index of the token in the answer.
        tokens: of the baseline and of the candidate; -1 where an answer has ended.
        baseline: the baseline's scores of these two tokens.
        candidate: the candidate's scores of these two tokens.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    baseline: tuple[float, float]
    candidate: tuple[float, float]

    @property
    def gap(self) -> float:
        """The larger of the two sides' differences between the two scores: small means a near tie. NaN is unknown."""
        gaps = (self.baseline[0] - self.baseline[1], self.candidate[1] - self.candidate[0])
        return max(gaps) if all(gap == gap for gap in gaps) else nan


def divergences(baseline: Sequence[Answer], candidate: Sequence[Answer]) -> list[Divergence]:
    """The first difference of each pair of answers that differ.

    Raises:
        ValueError: different numbers of answers.
    """
    found = []
    for prompt, (ours, theirs) in enumerate(zip(baseline, candidate, strict=True)):
        length = max(len(ours.token_ids), len(theirs.token_ids))
        for position in range(length):
            tokens = _token(ours, position), _token(theirs, position)
            if tokens[0] != tokens[1]:
                found.append(
                    Divergence(prompt, position, tokens, _both(ours, position, tokens), _both(theirs, position, tokens))
                )
                break
    return found


def _token(answer: Answer, position: int) -> int:
    return answer.token_ids[position] if position < len(answer.token_ids) else -1


def _both(answer: Answer, position: int, tokens: tuple[int, int]) -> tuple[float, float]:
    scores = answer.scores[position] if position < len(answer.scores) else {}
    return scores.get(tokens[0], nan), scores.get(tokens[1], nan)
