"""Torch twins of `rope_tables` and `rope`."""

import torch


def rope_tables(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions [T] times `inv_freq` [D/2], times `scale`: two [T, D/2] float32."""
    angles = positions.float().unsqueeze(1) * inv_freq.unsqueeze(0)
    return angles.cos() * scale, angles.sin() * scale


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, N, D] and k [T, K, D] by `cos` and `sin` [T, D/2].

    Dimension i pairs with i + D/2 (the layout of Hugging Face checkpoints). Float32 inside, input dtype outside.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
