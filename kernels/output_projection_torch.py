"""Torch twin of `output_projection`."""

import torch


def output_projection(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Heads x [T, N, D] times `weight` [N * D, H]: [T, H] in x's dtype, summed in float32."""
    return x.flatten(1) @ weight
