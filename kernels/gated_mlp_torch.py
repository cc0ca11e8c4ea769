"""Torch twin of `gated_mlp`."""

import torch

from vllm_neuron.kernels.silu_mul_torch import silu_mul


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """(silu(x gate) * (x up)) down for x [T, H], `gate_up` [H, 2I] (gate first) and `down` [I, H]: [T, H]."""
    return silu_mul(x @ gate_up) @ down
