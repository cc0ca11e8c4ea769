"""Graph executors with random weights, without vLLM around them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.models.registry import build_model
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route

BLOCK_SIZE = 32


def executor(
    backend: str,
    sizes: SimpleNamespace,
    dtype: torch.dtype,
    folder: Path,
    requests: int,
    context: int,
    twins: bool = False,
    **limits: Any,
) -> GraphExecutor:
    """One for up to `requests` requests of up to `context` tokens, with that one context bucket.

    Args:
        backend: value of VLLM_NEURON_BACKEND.
        sizes: of the model.
        dtype: of weights and KV cache.
        folder: of the compile cache.
        requests: the one batch bucket.
        context: max_model_len.
        twins: whether torch twins compute everything.
        limits: further fields of ResolvedConfig.
    """
    config = ResolvedConfig(
        backend=backend,
        cpu_mode=True,
        max_model_len=context,
        max_num_seqs=requests,
        num_seqs_buckets=(requests,),
        decode_context_length_buckets=(context,),
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        v2_model_runner=True,
        disable_warmup_compile=False,
        disable_nki_kernels=twins,
        **limits,
    )
    model = build_model(sizes)
    weights = {name: (torch.randn(spec.shape) * 0.05).to(dtype) for name, spec in model.weight_table.items()}
    cache = CompileCache(CacheFolders(folder), backend)
    made = GraphExecutor(model, config, select_route(backend, CPU), cache, weights, dtype)
    made.allocate_kv_cache(1 + requests * context // BLOCK_SIZE)
    return made
