"""Time of single steps on the XLA route in CPU mode, without vLLM around them.

    python -m pytest benchmarks/test_xla_step.py --benchmark-columns=min,median,rounds

Model and steps are those of the native route's benchmark. The KV cache holds as many blocks as given below, so that a
cache which is not updated in place shows.
"""

from typing import Any

import pytest
import torch
from test_native_step import BLOCK_SIZE, SIZES, step_inputs
from torch.utils import _pytree as pytree

from vllm_neuron.kv_cache.layout import layer_shapes
from vllm_neuron.models.registry import build_model
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.xla import XlaRoute

NUM_BLOCKS = 1000
"""Of 32 tokens in 30 layers: 0.7 GB."""


@pytest.mark.parametrize(
    ("requests", "rows", "live", "start"),
    [(1, 1, 1, 200), (8, 1, 1, 200), (1, 1024, 900, 0)],
    ids=["decode-1", "decode-8", "prefill-900"],
)
def test_step(benchmark: Any, requests: int, rows: int, live: int, start: int) -> None:
    torch.manual_seed(0)
    route, model, dtype = XlaRoute(CPU), build_model(SIZES), torch.bfloat16
    weights = {name: (torch.randn(spec.shape) * 0.05).to(dtype) for name, spec in model.weight_table.items()}
    weights |= model.constants
    shapes = layer_shapes(model.kv_layers, NUM_BLOCKS, BLOCK_SIZE)
    cache = [(torch.empty(s, dtype=dtype, device="meta"), torch.empty(s, dtype=dtype, device="meta")) for s in shapes]
    inputs = step_inputs(requests, rows, live, start)
    meta = [pytree.tree_map(lambda t: torch.empty_like(t, device="meta"), tree) for tree in (weights, inputs)]
    executable = route.trace("step", model.step, meta[0], cache, meta[1]).lower().compile()
    placed, held = route.place_weights(weights), route.allocate_kv_cache(shapes, dtype)

    def run() -> None:
        nonlocal held
        _, held = executable(placed, held, inputs)

    benchmark.pedantic(run, rounds=4 if rows > 1 else 60, warmup_rounds=2)
