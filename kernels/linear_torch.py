"""Torch twin of `linear`."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, I] times `weight` [O, I] transposed, plus `bias` [O]: [T, O] in x's dtype, summed in float32."""
    return torch.nn.functional.linear(x, weight, bias)
