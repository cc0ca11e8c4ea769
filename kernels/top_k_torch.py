"""Torch twins of `top_k` and `argmax`."""

import torch


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest elements of each row of x [B, V] floating point, in order: values [B, k] and columns [B, k] int32.

    Of equal elements those with the lowest column come first, also where not all of them are among the k.
    """
    values, columns = torch.sort(x, dim=-1, descending=True, stable=True)
    return values.narrow(-1, 0, k), columns.narrow(-1, 0, k).to(torch.int32)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Column of the largest element of each row of x [B, V], of equal ones the lowest: [B] int32."""
    return top_k(x, 1)[1].squeeze(1)
