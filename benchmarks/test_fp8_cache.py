"""Time of a decode step by what the KV cache stores, on both routes in CPU mode, without vLLM around it.

    python -m pytest benchmarks/test_fp8_cache.py --benchmark-columns=min,median,rounds

The model has the sizes of SmolLM2-135M in bfloat16 and random weights; eight requests with 900 tokens of context each.
"""

from typing import Any

import pytest
import torch
from steps import BLOCK_SIZE, CONTEXT, ROUTES, SIZES, compiled_step, step_inputs

from vllm_neuron.models.fp8_cache import with_fp8_cache
from vllm_neuron.models.registry import build_model

REQUESTS = 8


@pytest.mark.parametrize("stored", ["bfloat16", "fp8"])
@pytest.mark.parametrize("route", ROUTES)
def test_decode_step(benchmark: Any, route: str, stored: str) -> None:
    torch.manual_seed(0)
    model = build_model(SIZES)
    if stored == "fp8":
        model = with_fp8_cache(model, 448.0)
    run = compiled_step(route, model, step_inputs(REQUESTS, 1, 1, 900), 1 + REQUESTS * CONTEXT // BLOCK_SIZE)
    benchmark.pedantic(run, rounds=30, warmup_rounds=2)
