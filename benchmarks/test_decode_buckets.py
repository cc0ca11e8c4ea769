"""Time of a decode step by context bucket, on both routes in CPU mode, without vLLM around it.

    python -m pytest benchmarks/test_decode_buckets.py --benchmark-columns=min,median,rounds

The model has the sizes of SmolLM2-135M with six of its layers, in bfloat16 with random weights; four requests. "full":
the context fills its bucket. "short": 100 tokens in every bucket, as if there were no smaller one. The XLA route reads
the whole bucket, and so would a Neuron device; the native route's CPU kernels look at the tokens that there are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_native_step import SIZES

from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.inputs import Row
from vllm_neuron.models.registry import build_model
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route

REQUESTS, BLOCK_SIZE, CONTEXTS = 4, 32, (256, 1024, 4096)


def executor(backend: str, context: int, folder: Path) -> GraphExecutor:
    """With the one bucket, so that it takes short contexts too."""
    config = ResolvedConfig(
        backend=backend,
        cpu_mode=True,
        max_model_len=context,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=128,
        num_batched_tokens_buckets=(128,),
        num_seqs_buckets=(REQUESTS,),
        decode_context_length_buckets=(context,),
        kv_segment_size=None,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        v2_model_runner=True,
        disable_warmup_compile=False,
        disable_nki_kernels=False,
    )
    model = build_model(type(SIZES)(**{**vars(SIZES), "num_hidden_layers": 6}))
    weights = {name: (torch.randn(s.shape) * 0.05).bfloat16() for name, s in model.weight_table.items()}
    cache = CompileCache(CacheFolders(folder), backend)
    made = GraphExecutor(model, config, select_route(backend, CPU), cache, weights, torch.bfloat16)
    made.allocate_kv_cache(1 + REQUESTS * context // BLOCK_SIZE)
    return made


@pytest.mark.parametrize("filled", ["full", "short"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("backend", ["neuron_native", "vllm_neuron"])
def test_decode_step(benchmark: Any, backend: str, context: int, filled: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = executor(backend, context, tmp_path)
    columns = context // BLOCK_SIZE
    position = context - 1 if filled == "full" else 99
    rows = [
        Row(np.array([request + 5]), position, (np.arange(1 + request * columns, 1 + (request + 1) * columns),))
        for request in range(REQUESTS)
    ]
    benchmark.pedantic(made.run_decode, args=(rows,), rounds=20, warmup_rounds=3)
    assert set(made.statistics.executions) == {f"decode_b{REQUESTS}_ctx{context}"}
