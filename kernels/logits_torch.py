"""Torch twin of `logits`."""

import torch


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [R, H] times `weight` [V, H] transposed: [R, V] float32, rounded to hidden's dtype before."""
    return torch.nn.functional.linear(hidden, weight).float()
