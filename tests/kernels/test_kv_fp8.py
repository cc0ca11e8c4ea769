"""8-bit floats in the KV cache: the torch twins against the formula, and the C++ kernels against the twins."""

from itertools import product

import pytest
import torch

from vllm_neuron.kernels import kv_write_torch, paged_attention_torch
from vllm_neuron.kernels.cpu import ops
from vllm_neuron.kernels.kv_fp8_torch import FP8, KVScales, kv_dequantize, kv_quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KV_HEADS, HEADS, BLOCK_SIZE, NUM_BLOCKS = 2, 6, 8, 20


def scales(limit: float = 448.0) -> KVScales:
    dequantize = torch.tensor([0.5, 3.0])
    return KVScales(dequantize.reciprocal(), dequantize, torch.tensor([limit]))


def random(*shape: int, seed: int = 0, factor: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * factor


def filled(dim: int, dtype: torch.dtype, limit: float = 448.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches whose every slot the twin has written; some values are beyond the limit."""
    slots = NUM_BLOCKS * BLOCK_SIZE
    k, v = random(slots, KV_HEADS, dim, seed=1, factor=3), random(slots, KV_HEADS, dim, seed=2, factor=700)
    empty = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, dim).to(FP8)
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(3)).int()
    return kv_write_torch.kv_write(empty, empty, k.to(dtype), v.to(dtype), order, scales(limit))


@pytest.mark.parametrize("limit", [448.0, 240.0])
def test_quantize_divides_clamps_and_rounds(limit: float) -> None:
    x = torch.cat([random(4000, factor=300), torch.tensor([1e30, -1e30, torch.inf, 0.0, 1e-9])]).view(1, 1, -1)
    scale = torch.tensor([1.7])
    values = kv_quantize(x, scale.reciprocal(), torch.tensor([limit]))
    assert values.dtype is FP8 and values.float().abs().max() == limit and not values.float().isnan().any()
    back = kv_dequantize(values, scale, torch.float32)
    clamped = x.clamp(-limit * 1.7, limit * 1.7)
    # Half of the last of three bits of fraction; below 2^-6 a step of 2^-9.
    torch.testing.assert_close(back, clamped, rtol=2**-4 + 1e-6, atol=1.7 * 2**-10)


@pytest.mark.parametrize(("dtype", "limit", "dim"), list(product(DTYPES, [448.0, 240.0], [16, 20])))
def test_cpp_write_is_the_twins_bit_for_bit(dtype: torch.dtype, limit: float, dim: int) -> None:
    caches = filled(dim, dtype)
    k, v = (random(9, 2 * KV_HEADS, dim, seed=s, factor=900).to(dtype)[:, :KV_HEADS] for s in (4, 5))
    slots = torch.tensor([3, 150, 7, 9, 0, 100, 44, 45, 46], dtype=torch.int32)
    wanted = kv_write_torch.kv_write(*caches, k, v, slots, scales(limit))
    got = ops.kv_write(*(cache.clone() for cache in caches), k, v, slots, scales(limit))
    for mine, theirs, old in zip(got, wanted, caches, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        assert not torch.equal(mine.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "requests", "window"), [(1, 4, None), (1, 4, 30), (40, 1, None), (40, 1, 30)])
@pytest.mark.parametrize("dim", [16, 20])
def test_cpp_attention_is_the_twins(dtype: torch.dtype, rows: int, requests: int, window: int | None, dim: int) -> None:
    caches = filled(dim, dtype)
    q = random(rows * requests, HEADS, dim, seed=6).to(dtype)
    table = torch.stack([torch.randperm(NUM_BLOCKS)[:10] for _ in range(requests)]).int()
    positions = torch.arange(30, 70).int() if requests == 1 else torch.tensor([5, 79, 40, 0]).int()
    call = (q, *caches, table, positions, dim**-0.5, window, None, scales())
    wanted, got = paged_attention_torch.paged_attention(*call).float(), ops.paged_attention(*call).float()
    tolerance = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert got.isfinite().all() and (got - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 40])
def test_cpp_reads_every_number(rows: int) -> None:
    """One token at a time is visible, so the result is its value: all 256 of them."""
    everything = torch.arange(256, dtype=torch.uint8).view(FP8).view(1, 16, 1, 16)
    if rows > 1:
        # Rows of one request share what they see, and nothing times NaN is NaN.
        everything = everything.float().nan_to_num(1.0).to(FP8)
    caches = torch.zeros(1, 16, 1, 16).to(FP8), everything
    unscaled = KVScales(torch.ones(2), torch.ones(2), torch.tensor([448.0]))
    positions = torch.arange(max(rows, 16)).clamp(max=15).int()
    table = torch.zeros(16 if rows == 1 else 1, 1, dtype=torch.int32)
    q = torch.zeros(len(positions), 1, 16)
    got = ops.paged_attention(q, *caches, table, positions, 1.0, 1, scales=unscaled)
    torch.testing.assert_close(got[:16, 0], everything.float().view(16, 16), rtol=0, atol=0, equal_nan=True)


def test_scales_go_with_8_bit_floats_and_with_nothing_else() -> None:
    narrow, rows, slots = filled(16, torch.float32), random(1, KV_HEADS, 16), torch.zeros(1, dtype=torch.int32)
    wide = tuple(cache.float() for cache in narrow)
    for write in (kv_write_torch.kv_write, ops.kv_write):
        for caches, given in ((narrow, None), (wide, scales())):
            with pytest.raises((ValueError, RuntimeError), match="scales"):
                write(*caches, rows, rows, slots, given)
    table = torch.zeros(1, 1, dtype=torch.int32)
    for attend in (paged_attention_torch.paged_attention, ops.paged_attention):
        with pytest.raises((ValueError, RuntimeError), match="scales"):
            attend(random(1, HEADS, 16), *narrow, table, slots, 1.0)
