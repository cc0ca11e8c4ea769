"""A KV cache of 8-bit floats on both routes: what a step computes, where it is written, and how many bytes it takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.routes.native_steps import BLOCK_SIZE, MODEL, inputs, to_meta, weights
from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kernels.kv_fp8_torch import FP8
from vllm_neuron.kv_cache.layout import layer_shapes
from vllm_neuron.models.fp8_cache import with_fp8_cache
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.xla import XlaRoute
from vllm_neuron.weights.kv_scales import scale_weights

ROUTES = {
    "native, C++ kernels": (NativeRoute(CPU), KernelSet.CPU),
    "native, torch twins": (NativeRoute(CPU), KernelSet.TORCH),
    "XLA": (XlaRoute(CPU), KernelSet.TORCH),
}
NUM_BLOCKS = 20
SHAPES = layer_shapes(MODEL.kv_layers, NUM_BLOCKS, BLOCK_SIZE)
NARROW = with_fp8_cache(MODEL, 448.0)
SCALES = torch.tensor([[0.01, 0.02], [0.03, 0.015]])


def num_bytes(placed: Any) -> int:
    return sum(tensor.nbytes for tensor in getattr(placed, "tensors", placed))


@pytest.mark.parametrize("name", ROUTES)
def test_steps_write_and_read_8_bit_floats(name: str) -> None:
    route, kernels = ROUTES[name]
    given = {**weights(), **scale_weights(SCALES, 448.0), **NARROW.constants}
    prefill, decode = inputs(1, 32, start=0), inputs(1, 1, start=32)
    expected, cache = [], [(torch.zeros(s).to(FP8), torch.zeros(s).to(FP8)) for s in SHAPES]
    for step in (prefill, decode):
        outputs, cache = NARROW.step(given, cache, step)
        expected.append(outputs.logits)
    placed, held = route.place_weights(given), route.allocate_kv_cache(SHAPES, FP8)
    assert 2 * num_bytes(held) == num_bytes(route.allocate_kv_cache(SHAPES, torch.bfloat16))
    for step, wanted in zip((prefill, decode), expected, strict=True):
        with using(kernels):
            traced = route.trace("step", NARROW.step, *map(to_meta, (given, cache, step)))
            executable = route.load(traced.lower().compile().save())
        outputs, held = executable(placed, held, step)
        torch.testing.assert_close(outputs.logits, wanted, rtol=0, atol=2e-3 * wanted.abs().max())
    exact = MODEL.step(weights(), [(torch.zeros(s), torch.zeros(s)) for s in SHAPES], prefill)[0].logits
    assert not torch.allclose(expected[0], exact, rtol=0, atol=1e-3), "8 bits do not hold what 32 do"


def test_native_steps_write_in_place() -> None:
    route = NativeRoute(CPU)
    given = {**weights(), **scale_weights(SCALES, 448.0), **NARROW.constants}
    held, step = route.allocate_kv_cache(SHAPES, FP8), inputs(2, 1)
    before = [tensor.data_ptr() for tensor in held.tensors]
    cache = [(torch.zeros(s).to(FP8), torch.zeros(s).to(FP8)) for s in SHAPES]
    for kernels in (KernelSet.CPU, KernelSet.TORCH):
        with using(kernels):
            executable = route.trace("step", NARROW.step, *map(to_meta, (given, cache, step))).lower().compile()
        _, held = executable(route.place_weights(given), held, step)
        assert [tensor.data_ptr() for tensor in held.tensors] == before
        assert all(tensor.view(torch.uint8).any() for tensor in held.tensors)
        for tensor in held.tensors:
            tensor.view(torch.uint8).zero_()


def test_layers_of_different_dtypes_are_refused() -> None:
    from vllm_neuron.kv_cache.layout import cache_dtype

    first, second = NARROW.kv_layers
    with pytest.raises(ValueError, match="different dtypes"):
        cache_dtype((first, replace(second, dtype=None)), torch.float32)
