"""The three-way rule: whether a difference from the truth is no more than rounding explains, and where it begins.

Three computations of the same rows are compared: the truth (transformers, one precision up), the noise (transformers
in the dtype that is served) and ours. Ours may differ from the truth by a stated factor more than the noise does.
Rows are judged one by one, so one bad row among thousands is found.

Shape letters: S stages in the order of computing, T rows, N numbers of a row (H of a residual, V of logits).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DEFAULT_FACTOR = 4.0
"""Rounding in another order gives errors up to about twice those of transformers (docs/accuracy.md has measurements),
and what is wrong rather than rounded gives hundreds of times as much in 16 bits."""


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


def allowed_errors(noise: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """The most that each row's error may be, for the noise [T] of one stage: [T].

    A row whose noise happens to be small is measured by the median of the rows; a stage without noise (a copy of the
    weights, say) may differ by one rounding of `dtype`.
    """
    floor = noise.median().clamp(min=torch.finfo(dtype).eps / 2)
    return factor * noise.maximum(floor)


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
        allowed = allowed_errors(noises, factor, dtype)
        # NaN is no number that anything allows.
        bad = ~(errors <= allowed)
        if bad.any():
            row = int(bad.nonzero()[0])
            return Excess(
                stage, row, float(errors[row]), float(noises[row]), float(allowed[row]), int(bad.count_nonzero())
            )
    return None
