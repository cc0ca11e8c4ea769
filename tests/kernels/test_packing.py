"""Packed weights: products of few rows read them, and no bit of a result changes."""

import ctypes
import logging
import mmap
from typing import Any

import pytest
import torch

from tests.routes import native_steps as steps
from tests.routes.test_kernels import every_route, lowered
from vllm_neuron.kernels.cpu import ops
from vllm_neuron.kernels.cpu.packing import pack
from vllm_neuron.kernels.dispatch import KernelSet
from vllm_neuron.routes.route import Route

ROOM = 1 << 30


def memory_for(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty(2 * weight.numel() + 2048 * weight.shape[0], dtype=torch.uint8)


@pytest.fixture
def copies() -> Any:
    return torch.classes.vllm_neuron_cpu.Copies()


def packs(copies: Any, weight: torch.Tensor) -> bool:
    return bool(copies.add(weight, memory_for(weight)))


PACKS = packs(torch.classes.vllm_neuron_cpu.Copies(), torch.zeros(4, 64, dtype=torch.bfloat16))
"""Whether this CPU has the instructions to unpack with. Without them every weight is read as it is."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def erase(weight: torch.Tensor) -> None:
    """What nobody may do: then only who reads the packed copy still has the numbers."""
    ctypes.memset(weight.data_ptr(), 0, weight.nbytes)


@pytest.mark.parametrize("shape", [(576, 1536), (960, 576), (4, 64), (7, 37), (130, 33), (64, 1), (66, 100)], ids=str)
def test_no_bit_of_a_product_changes(copies: Any, shape: tuple[int, int]) -> None:
    weight, bias = random(*shape), random(shape[0], seed=1)
    rows = [random(count, shape[1], seed=count) for count in range(1, 10)]
    expected = [ops.linear(x, weight, bias) for x in rows]
    assert packs(copies, weight) is PACKS
    for x, wanted in zip(rows, expected, strict=True):
        assert torch.equal(ops.linear(x, weight, bias), wanted)


def test_every_number_comes_back(copies: Any) -> None:
    """Finite numbers of all magnitudes among usual ones, so that tiles have some whose first bytes have no code."""
    finite = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    eye = torch.eye(576).bfloat16()
    for numbers in finite[finite.isfinite()].split(4096):
        weight = random(4096, 576)
        weight[: numbers.numel(), 100] = numbers
        assert packs(copies, weight) is PACKS
        for k in (0, 100, 575):
            assert torch.equal(ops.linear(eye[k : k + 1], weight)[0], weight[:, k])


def test_numbers_without_any_order_are_left_as_they_are(copies: Any) -> None:
    numbers = torch.randint(0, 0x7F00, (64, 64), generator=torch.Generator().manual_seed(0))
    weight = numbers.to(torch.uint16).view(torch.bfloat16)
    assert not packs(copies, weight)
    assert torch.equal(ops.linear(torch.eye(64).bfloat16()[:1], weight)[0], weight[:, 0])


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_read_the_copy_and_many_the_weight(copies: Any, rows: int) -> None:
    weight, x = random(64, 128), random(9, 128, seed=1)
    expected = ops.linear(x[:rows], weight)
    assert packs(copies, weight) is PACKS
    erase(weight)
    assert torch.equal(ops.linear(x[:rows], weight), expected) is PACKS
    assert not ops.linear(x, weight).any()


def test_a_copy_ends_with_its_weight_wherever_the_next_one_lies(copies: Any) -> None:
    piece = mmap.mmap(-1, 64 * 128 * 2)
    first = torch.frombuffer(piece, dtype=torch.bfloat16).view(64, 128)
    first.copy_(random(64, 128))
    assert packs(copies, first) is PACKS
    address = first.data_ptr()
    del first
    second = torch.frombuffer(piece, dtype=torch.bfloat16).view(64, 128)
    second.copy_(random(64, 128, seed=1))
    x = random(1, 128, seed=2)
    assert second.data_ptr() == address
    assert torch.equal(ops.linear(x, second), ops.linear(x, second.clone()))


def test_copies_end_with_what_owns_them() -> None:
    weight, x = random(64, 128), random(1, 128, seed=1)
    owner = pack((weight,), ROOM)
    erase(weight)
    assert bool(ops.linear(x, weight).any()) is PACKS
    del owner
    assert not ops.linear(x, weight).any()


def test_a_part_of_a_weight_has_no_copy(copies: Any) -> None:
    weight, x = random(64, 128), random(1, 128, seed=1)
    assert packs(copies, weight) is PACKS
    erase(weight)
    assert not ops.linear(x, weight[:32]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_numbers_are_not_packed(copies: Any, dtype: torch.dtype) -> None:
    assert not packs(copies, random(64, 64).to(dtype))
    assert not packs(copies, random(64).view(64))


def test_a_piece_of_memory_too_small_is_left_alone(copies: Any) -> None:
    memory = torch.full((100,), 7, dtype=torch.uint8)
    assert copies.add(random(64, 64), memory) == 0
    assert bool((memory == 7).all())


def test_copies_are_made_where_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    weights = (random(64, 128), torch.ones(128).bfloat16(), random(32, 100), random(8, 8).float())
    with caplog.at_level(logging.INFO, "vllm_neuron.kernels.cpu.packing"):
        pack(weights, room=64 * 128 * 3 // 2)
        assert "Weights are not packed: that would need" in caplog.text
        owner = pack(weights, ROOM)
        assert "Packed weights into" in caplog.text
    x = random(1, 128, seed=1)
    expected = ops.linear(x, weights[0].clone())
    erase(weights[0])
    assert torch.equal(ops.linear(x, weights[0]), expected) is PACKS and owner is not None


@every_route
def test_a_graph_reads_the_copies(route: Route) -> None:
    weights, inputs = steps.weights(torch.bfloat16), steps.inputs(1, 1)
    step = lowered(route, steps.MODEL.step, (weights, steps.cache(20, torch.bfloat16), inputs), (KernelSet.CPU,))
    executable, placed = step.compile(), route.place_weights(weights)

    def logits() -> torch.Tensor:
        held = route.allocate_kv_cache(steps.cache_shapes(20), torch.bfloat16)
        return executable(placed, held, inputs)[0].logits.clone()

    expected = logits()
    owner = pack(tuple(weights.values()), ROOM)
    assert torch.equal(logits(), expected)
    for name, weight in weights.items():
        if weight.dim() == 2 and weight.dtype is torch.bfloat16 and "embed" not in name:
            erase(weight)
    assert torch.equal(logits(), expected) is PACKS and owner is not None
