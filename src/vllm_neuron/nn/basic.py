"""Embedding, matrix product, norms and activation."""

import torch

from vllm_neuron.kernels.dispatch import implementation


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [V, H] at `ids` [T] int32: [T, H]."""
    return implementation("embedding")(ids, table)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, for x [T, I], weight [O, I], bias [O]: [T, O] in x's dtype."""
    return implementation("linear")(x, weight, bias)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden @ weight.T for hidden [R, H], weight [V, H]: [R, V] float32, rounded to hidden's dtype before."""
    return implementation("logits")(hidden, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, for x [..., H], weight [H] (arXiv 1910.07467)."""
    return implementation("rms_norm")(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual): the next block's input and the next residual, both [T, H]."""
    return implementation("add_rms_norm")(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2I], gate first: [T, I] (SwiGLU, arXiv 2002.05202)."""
    return implementation("silu_mul")(gate_up)
