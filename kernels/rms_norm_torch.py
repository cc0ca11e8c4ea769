"""Torch twins of `rms_norm` and `add_rms_norm`."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] over its root mean square, times `weight` [H]; computed in float32, returned in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H]; the sum is rounded to x's dtype before it is normed."""
    total = x + residual
    return rms_norm(total, weight, eps), total
