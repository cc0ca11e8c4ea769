"""Torch twin of `norm_qkv_rope`."""

import torch

from vllm_neuron.kernels.rms_norm_torch import rms_norm
from vllm_neuron.kernels.rope_torch import rope


def norm_qkv_rope(
    x: torch.Tensor,
    gamma: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, N, D], k and v [T, K, D] of the attention of x [T, H]: rms_norm, projection, rope of q and k.

    Args:
        x: [T, H].
        gamma: [H], weight of the norm.
        eps: added to the mean of the squares.
        weight: [H, (N + 2 K) * D], the heads of q, then of k, then of v.
        cos, sin: [T, D/2], float32.
        heads: N.
    """
    projected = (rms_norm(x, gamma, eps) @ weight).unflatten(1, (-1, 2 * cos.shape[1]))
    kv_heads = (projected.shape[1] - heads) // 2
    q, k, v = projected.split((heads, kv_heads, kv_heads), dim=1)
    return *rope(q, k, cos, sin), v
