"""The NKI kernels under the names and signatures of the torch twins, as nodes of a graph; see `opaque`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_neuron.kernels import opaque
from vllm_neuron.kernels.decode_mask_torch import decode_mask
from vllm_neuron.kernels.kv_fp8_torch import KVScales
from vllm_neuron.kernels.refusal import RefusedError


@dataclass(frozen=True)
class NkiOptions:
    """How NKI kernels are called.

    Attributes:
        on_device: on Neuron devices; else on the CPU, in the simulator.
        in_place: a graph may write to the KV cache that it is given.
        torch_mask: decode attention takes a mask that torch made, and does not make its own.
        cores: physical cores that share a kernel's work, 1 or 2.
    """

    on_device: bool = False
    in_place: bool = True
    torch_mask: bool = False
    cores: int = 1


class NkiOps:
    """One method per op that has an NKI kernel. Each raises RefusedError if the kernel does not take its arguments.

    Args:
        options: how kernels are called.

    Raises:
        RuntimeError: torch-neuronx is too old to take kernels.
    """

    def __init__(self, options: NkiOptions) -> None:
        self._options = options
        opaque.register(options.on_device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `rms_norm_torch`."""
        return self._call("rms_norm", x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `rms_norm_torch`."""
        return self._call("add_rms_norm", x, residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `rope_torch`."""
        return self._call("rope", q, k, cos, sin)

    def kv_write(
        self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, scales: KVScales | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `kv_write_torch`. Where that is allowed it writes into the caches it is given and returns them."""
        _refuse(scales)
        if not self._options.in_place:
            return self._call("kv_written", k_cache, v_cache, k, v, slots)
        self._call("kv_write", k_cache, v_cache, k, v, slots)
        return k_cache, v_cache

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        positions: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """See `paged_attention_torch`. The kernel for decoding is asked first: it takes few rows per request only."""
        _refuse(scales)
        shared = q, k_cache, v_cache, block_table, positions, scale, window, sinks
        mask = None
        if self._options.torch_mask:
            mask = decode_mask(positions, block_table.shape[1] * k_cache.shape[1], window)
        try:
            return self._call("paged_decode_attention", *shared, mask)
        except RefusedError:
            return self._call("paged_prefill_attention", *shared)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `top_k_torch`."""
        return self._call("top_k", x, k)

    def argmax(self, x: Tensor) -> Tensor:
        """See `argmax_torch`."""
        return self._call("argmax", x)

    def _call(self, name: str, *arguments: Any) -> Any:
        arguments = (*arguments, self._options.cores)
        try:
            opaque.check(name, *arguments)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        return getattr(getattr(torch.ops, opaque.NAMESPACE), name)(*arguments)


def _refuse(scales: KVScales | None) -> None:
    if scales is not None:
        raise RefusedError("the KV cache must not hold 8-bit floats")
