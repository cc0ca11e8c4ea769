"""Torch twin of `top_k`."""

import torch


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest elements of each row of x [B, V] float32, in order: values [B, k] and columns [B, k] int32.

    Of equal elements those with the lowest column come first, also where not all of them are among the k.
    """
    values, columns = torch.sort(x, dim=-1, descending=True, stable=True)
    return values.narrow(-1, 0, k), columns.narrow(-1, 0, k).to(torch.int32)
