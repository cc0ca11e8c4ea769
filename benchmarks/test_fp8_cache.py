"""Time of a decode step by what the KV cache stores, on both routes in CPU mode, without vLLM around it.

    python -m pytest benchmarks/test_fp8_cache.py --benchmark-columns=min,median,rounds

The model has the sizes of SmolLM2-135M in bfloat16 and random weights; eight requests with 900 tokens of context each.
"""

from typing import Any

import pytest
import torch
from test_native_step import BLOCK_SIZE, CONTEXT, SIZES, step_inputs
from torch.utils import _pytree as pytree

from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kv_cache.layout import cache_dtype, layer_shapes
from vllm_neuron.models.fp8_cache import with_fp8_cache
from vllm_neuron.models.registry import build_model
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.xla import XlaRoute

REQUESTS = 8
ROUTES = {"native": (NativeRoute(CPU), KernelSet.CPU), "xla": (XlaRoute(CPU), KernelSet.TORCH)}


@pytest.mark.parametrize("stored", ["bfloat16", "fp8"])
@pytest.mark.parametrize("route", ROUTES)
def test_decode_step(benchmark: Any, route: str, stored: str) -> None:
    torch.manual_seed(0)
    (compiler, kernels), dtype = ROUTES[route], torch.bfloat16
    model = build_model(SIZES)
    if stored == "fp8":
        model = with_fp8_cache(model, 448.0)
    weights: dict[str, torch.Tensor] = {
        name: torch.ones(spec.shape) if spec.dtype else (torch.randn(spec.shape) * 0.05).to(dtype)
        for name, spec in model.weight_table.items()
    }
    weights |= model.constants
    held_as = cache_dtype(model.kv_layers, dtype)
    shapes = layer_shapes(model.kv_layers, 1 + REQUESTS * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    cache = [tuple(torch.empty(s, dtype=held_as, device="meta") for _ in "kv") for s in shapes]
    inputs = step_inputs(REQUESTS, 1, 1, 900)
    meta = [pytree.tree_map(lambda t: torch.empty_like(t, device="meta"), tree) for tree in (weights, inputs)]
    with using(kernels):
        executable = compiler.trace("step", model.step, meta[0], cache, meta[1]).lower().compile()
    placed, held = compiler.place_weights(weights), compiler.allocate_kv_cache(shapes, held_as)

    def run() -> None:
        nonlocal held
        _, held = executable(placed, held, inputs)

    benchmark.pedantic(run, rounds=30, warmup_rounds=2)
