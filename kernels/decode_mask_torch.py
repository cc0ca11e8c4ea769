"""Torch twin of `decode_mask`."""

import torch


def decode_mask(positions: torch.Tensor, context: int, window: int | None = None) -> torch.Tensor:
    """Which tokens of a context each row sees: those at 0 .. positions[t], or the last `window` of them.

    Args:
        positions: [T] int32.
        context: S, tokens of the longest request, padding included.
        window: positions a row looks back on, its own included; None is all of them.

    Returns:
        uint8 [T, S], 1 where a row sees the token.
    """
    token = torch.arange(context, dtype=positions.dtype, device=positions.device)
    visible = token <= positions[:, None]
    if window is not None:
        visible = visible & (token > positions[:, None] - window)
    return visible.to(torch.uint8)
