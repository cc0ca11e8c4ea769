"""Time of single steps on both routes in CPU mode, without vLLM around them.

    python -m pytest benchmarks/test_steps.py --benchmark-columns=min,median,rounds

The model has the sizes of SmolLM2-135M in bfloat16 and random weights. Decode at a context of 200 tokens; prefill of
900 tokens in a bucket of 1024. Look at the minimum: on a machine that does something else the median tells little.
"""

from typing import Any

import pytest
import torch
from steps import ROUTES, SIZES, compiled_step, step_inputs

from vllm_neuron.models.registry import build_model

NUM_BLOCKS = 1000
"""Of 32 tokens in 30 layers: 0.7 GB, so that a cache which is not updated in place shows."""


@pytest.mark.parametrize(
    ("requests", "rows", "live", "start"),
    [(1, 1, 1, 200), (8, 1, 1, 200), (1, 1024, 900, 0)],
    ids=["decode-1", "decode-8", "prefill-900"],
)
@pytest.mark.parametrize("route", ROUTES)
def test_step(benchmark: Any, route: str, requests: int, rows: int, live: int, start: int) -> None:
    torch.manual_seed(0)
    run = compiled_step(route, build_model(SIZES), step_inputs(requests, rows, live, start), NUM_BLOCKS)
    benchmark.pedantic(run, rounds=4 if rows > 1 else 100, warmup_rounds=2)
