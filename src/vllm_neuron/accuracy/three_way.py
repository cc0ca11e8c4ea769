"""The three-way rule: whether a difference from the truth is no more than rounding explains, and where it begins.

Three computations of the same rows are compared: the truth (transformers, one precision up), the noise (transformers
in the dtype that is served) and ours. At each stage

- the median error of our rows may be `factor` times the median of the noise, which finds what is slightly wrong
  everywhere, and
- the error of each row may be ROW_SLACK * `factor` times the larger of that row's noise and the noise's 95th
  percentile, which finds what is very wrong somewhere.

Rows differ: a row that attends to few tokens has several times the rounding error of its neighbours, and which rows
these are changes with the order of sums.

Shape letters: S stages in the order of computing, T rows, N numbers of a row (H of a residual, V of logits).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DEFAULT_FACTOR = 2.0
"""Twice the rounding of transformers; docs/accuracy.md has what sound and what wrong models measure."""
ROW_SLACK = 2.0
"""How much more than the median a single row may exceed the noise."""
TAIL = 0.95


@dataclass(frozen=True)
class Excess:
    """Where a difference first exceeds what rounding explains.

    Attributes:
        stage: name of the stage, e.g. "layer 3".
        row: index of the first row of it that is too far off.
        error: relative RMS error of ours in that row.
        noise: relative RMS error of transformers in the served dtype in that row.
        allowed: the most that the rule allows there.
        rows: how many rows of the stage are too far off.
    """

    stage: str
    row: int
    error: float
    noise: float
    allowed: float
    rows: int


def row_errors(values: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Per row the root of mean((values - truth)^2) / mean(truth^2), for [T, N] both: [T] float64."""
    exact = truth.double()
    scale = exact.square().mean(-1).clamp(min=torch.finfo(torch.float64).tiny)
    return ((values.double() - exact).square().mean(-1) / scale).sqrt()


def allowed_errors(noise: torch.Tensor, factor: float, dtype: torch.dtype) -> tuple[float, torch.Tensor]:
    """The most that the median and that each row may be off, for the noise [T] of one stage: a number and [T].

    A stage without noise (a copy of the weights, say) may differ by one rounding of `dtype`.
    """
    floor = torch.finfo(dtype).eps / 2
    rows = noise.maximum(noise.quantile(TAIL)).clamp(min=floor)
    return factor * max(float(noise.median()), floor), ROW_SLACK * factor * rows


def first_excess(
    stages: Sequence[str],
    ours: Sequence[torch.Tensor],
    noise: Sequence[torch.Tensor],
    factor: float,
    dtype: torch.dtype,
) -> Excess | None:
    """The first row of the first stage that is further off than the rule allows; None if there is none.

    An error stays in the residual stream, so the stage where it enters is the first that shows it.

    Args:
        stages: S names.
        ours: S tensors [T] of relative errors.
        noise: the same of transformers in the served dtype.
        factor: how much more than the noise an error may be.
        dtype: that is served.
    """
    for stage, errors, noises in zip(stages, ours, noise, strict=True):
        allowed_median, allowed = allowed_errors(noises, factor, dtype)
        # NaN is no number that anything allows.
        if not float(errors.median()) <= allowed_median:
            allowed = torch.full_like(noises, allowed_median)
        bad = ~(errors <= allowed)
        if bad.any():
            row = int(bad.nonzero()[0])
            return Excess(
                stage, row, float(errors[row]), float(noises[row]), float(allowed[row]), int(bad.count_nonzero())
            )
    return None
