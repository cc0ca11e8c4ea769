"""Torch twin of `mask_logits`."""

import torch

WORD = 32
"""Bits of a word of a mask."""


def mask_logits(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] float32 with -inf where the mask [B, ceil(V / 32)] int32 has no bit.

    Bit i of word w, counted from the lowest, stands for token 32 w + i: the form of vLLM's grammar back ends.
    """
    bits = torch.arange(WORD, dtype=torch.int32, device=mask.device)
    allowed = torch.bitwise_right_shift(mask.unsqueeze(-1), bits).bitwise_and(1)
    allowed = allowed.flatten(1).narrow(1, 0, logits.shape[1])
    return torch.where(allowed != 0, logits, -torch.inf)
