"""Time of a decode step by context bucket in CPU mode, without vLLM around it.

    python -m pytest benchmarks/test_decode_buckets.py --benchmark-columns=min,median,rounds

The model has the sizes of SmolLM2-135M with six of its layers, in bfloat16 with random weights; four requests. "full":
the context fills its bucket. "short": 100 tokens in every bucket, as if there were no smaller one. Torch
twins that XLA compiled read the whole bucket, and so would a Neuron device; the C++ kernels of either route look at the
tokens that there are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executors import BLOCK_SIZE, executor
from steps import SIZES

from vllm_neuron.engine.inputs import Row

REQUESTS, CONTEXTS = 4, (256, 1024, 4096)
SIX_LAYERS = type(SIZES)(**{**vars(SIZES), "num_hidden_layers": 6})
PREFILL = {"max_num_batched_tokens": 128, "num_batched_tokens_buckets": (128,), "kv_segment_size": None}


@pytest.mark.parametrize("filled", ["full", "short"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("backend", "twins"), [("neuron_native", False), ("vllm_neuron", True)], ids=["cpp", "twins"])
def test_decode_step(benchmark: Any, backend: str, twins: bool, context: int, filled: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = executor(backend, SIX_LAYERS, torch.bfloat16, tmp_path, REQUESTS, context, twins, **PREFILL)
    columns = context // BLOCK_SIZE
    position = context - 1 if filled == "full" else 99
    rows = [
        Row(np.array([request + 5]), position, (np.arange(1 + request * columns, 1 + (request + 1) * columns),))
        for request in range(REQUESTS)
    ]
    benchmark.pedantic(made.run_decode, args=(rows,), rounds=20, warmup_rounds=3)
    assert set(made.statistics.executions) == {f"decode_b{REQUESTS}_ctx{context}"}
