"""The C++ kernels under the names and signatures of the torch twins. Importing this module builds them if need be.

Each is an operator `torch.ops.vllm_neuron_cpu.<name>`: opaque to a graph, so that lengths that vary from step to step
(how much of a context is visible) are looked at inside and cost only what they are.
"""

import torch

from vllm_neuron.kernels.cpu import build
from vllm_neuron.kernels.kv_fp8_torch import KVScales
from vllm_neuron.kernels.refusal import RefusedError

build.load()
_ops = torch.ops.vllm_neuron_cpu


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See `embedding_torch`."""
    return _ops.embedding(ids, table)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `linear_torch`."""
    return _ops.linear(x, weight, bias)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `logits_torch`."""
    return _ops.logits(hidden, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm_torch`."""
    return _ops.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rms_norm_torch`."""
    return _ops.add_rms_norm(x, residual, weight, eps)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rope_torch`."""
    return _ops.rope(q, k, cos, sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `silu_mul_torch`."""
    return _ops.silu_mul(gate_up)


def kv_write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    scales: KVScales | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kv_write_torch`. Writes into the caches it is given and returns them."""
    factors, limit = (None, None) if scales is None else (scales.quantize, scales.limit)
    _ops.kv_write(k_cache, v_cache, k, v, slots, factors, limit)
    return k_cache, v_cache


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """See `paged_attention_torch`.

    Raises:
        RefusedError: there are sinks.
    """
    if sinks is not None:
        raise RefusedError("sinks must be None")
    factors = None if scales is None else scales.dequantize
    return _ops.paged_attention(q, k_cache, v_cache, block_table, positions, scale, window, factors)


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `top_k_torch`."""
    return _ops.top_k(x, k)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """See `argmax_torch`."""
    return _ops.argmax(x)


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    """See `log_sum_exp_torch`."""
    return _ops.log_sum_exp(x)


def mask_logits(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """See `mask_logits_torch`."""
    return _ops.mask_logits(logits, mask)


@torch.library.register_fake("vllm_neuron_cpu::embedding")
def _embedding_form(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.new_empty(ids.shape[0], table.shape[1])


@torch.library.register_fake("vllm_neuron_cpu::linear")
def _linear_form(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("vllm_neuron_cpu::logits")
def _logits_form(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)


@torch.library.register_fake("vllm_neuron_cpu::rms_norm")
def _rms_norm_form(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("vllm_neuron_cpu::add_rms_norm")
def _add_rms_norm_form(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake("vllm_neuron_cpu::rope")
def _rope_form(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.register_fake("vllm_neuron_cpu::silu_mul")
def _silu_mul_form(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.register_fake("vllm_neuron_cpu::kv_write")
def _kv_write_form(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    factors: torch.Tensor | None,
    limit: torch.Tensor | None,
) -> None:
    return None


@torch.library.register_fake("vllm_neuron_cpu::paged_attention")
def _paged_attention_form(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    factors: torch.Tensor | None,
) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("vllm_neuron_cpu::top_k")
def _top_k_form(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], k), x.new_empty(x.shape[0], k, dtype=torch.int32)


@torch.library.register_fake("vllm_neuron_cpu::argmax")
def _argmax_form(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], dtype=torch.int32)


@torch.library.register_fake("vllm_neuron_cpu::log_sum_exp")
def _log_sum_exp_form(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], 1)


@torch.library.register_fake("vllm_neuron_cpu::mask_logits")
def _mask_logits_form(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape)
