"""Torch twin of `log_sum_exp`."""

import torch


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(x))) of each row of x [B, V] float32: [B, 1] float32; the least float of a row of -inf only."""
    return x.logsumexp(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
