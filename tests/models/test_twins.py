"""Each torch twin against the plain formula."""

import math

import pytest
import torch

from vllm_neuron import nn
from vllm_neuron.kernels.dispatch import OPS, KernelSet, implementation, using


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """One row and one head at a time, only over the keys that the row sees."""
    out = torch.empty_like(q)
    block_size = k_cache.shape[1]
    rows, group = q.shape[0] // block_table.shape[0], q.shape[1] // k_cache.shape[2]
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position - window + 1)
        seen = torch.arange(first, position + 1)
        blocks = block_table[row // rows][seen // block_size].long()
        keys, values = k_cache[blocks, seen % block_size].double(), v_cache[blocks, seen % block_size].double()
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ q[row, head].double() * scale
            out[row, head] = (scores.softmax(0) @ values[:, head // group]).to(q.dtype)
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("requests", [1, 3])
def test_paged_attention(requests: int, heads: int, kv_heads: int, window: int | None) -> None:
    rows, dim, block_size, width = 4, 10, 4, 5
    k_cache, v_cache = random(24, block_size, kv_heads, dim, seed=1), random(24, block_size, kv_heads, dim, seed=2)
    table = torch.randperm(24, generator=torch.Generator().manual_seed(3))[: requests * width]
    table = table.view(requests, width).int()
    starts = torch.tensor([0, 7, 16])[:requests]
    positions = (starts[:, None] + torch.arange(rows)).flatten().int()
    q = random(requests * rows, heads, dim, seed=4)
    expected = dense_attention(q, k_cache, v_cache, table, positions, 0.3, window)
    torch.testing.assert_close(nn.paged_attention(q, k_cache, v_cache, table, positions, 0.3, window), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_paged_attention_reads_nothing_but_what_a_row_sees(dtype: torch.dtype) -> None:
    """NaN and infinity at every position that no row sees, in used and unused blocks."""
    k_cache, v_cache = random(8, 4, 2, 16, seed=1, dtype=dtype), random(8, 4, 2, 16, seed=2, dtype=dtype)
    table, positions = torch.tensor([[5, 2, 7], [1, 6, 0]]).int(), torch.tensor([5, 2]).int()
    q = random(2, 4, 16, seed=3, dtype=dtype)
    clean = nn.paged_attention(q, k_cache, v_cache, table, positions, 0.25)
    seen = torch.zeros(8, 4, dtype=torch.bool)
    seen[5], seen[2, :2], seen[1, :3] = True, True, True
    for poison in (math.nan, math.inf, -math.inf):
        dirty_k, dirty_v = (cache.where(seen[..., None, None], poison) for cache in (k_cache, v_cache))
        assert torch.equal(nn.paged_attention(q, dirty_k, dirty_v, table, positions, 0.25), clean)


def test_paged_attention_survives_large_half_precision_scores() -> None:
    """q k^T beyond float16's range before it is scaled."""
    q = torch.full((1, 1, 64), 60.0, dtype=torch.float16)
    k_cache = torch.full((1, 2, 1, 64), 60.0, dtype=torch.float16)
    v_cache = random(1, 2, 1, 64, dtype=torch.float16)
    out = nn.paged_attention(q, k_cache, v_cache, torch.zeros(1, 1).int(), torch.ones(1).int(), 0.125)
    torch.testing.assert_close(out[0], v_cache[0].float().mean(0).half())


def test_kv_write_changes_its_slots_only() -> None:
    k_cache, v_cache = random(4, 3, 2, 8, seed=1), random(4, 3, 2, 8, seed=2)
    k, v = random(3, 2, 8, seed=3), random(3, 2, 8, seed=4)
    slots = torch.tensor([11, 4, 6]).int()
    before = k_cache.clone(), v_cache.clone()
    new_k, new_v = nn.kv_write(k_cache, v_cache, k, v, slots)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
    for new, old, rows in ((new_k, k_cache, k), (new_v, v_cache, v)):
        assert new.shape == old.shape
        assert torch.equal(new.flatten(0, 1)[slots.long()], rows)
        others = [slot for slot in range(12) if slot not in slots.tolist()]
        assert torch.equal(new.flatten(0, 1)[others], old.flatten(0, 1)[others])


def test_kv_write_takes_padding_rows_that_share_a_slot() -> None:
    cache = torch.zeros(2, 4, 1, 2)
    rows = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1).expand(3, 1, 2)
    new, _ = nn.kv_write(cache, cache, rows, rows, torch.tensor([6, 0, 0]).int())
    assert new[1, 2].eq(1).all()
    assert new[0, 0, 0, 0] in (2, 3)
    assert not new[1, [0, 1, 3]].any()


def test_rms_norm_and_its_sum() -> None:
    x, residual, weight = random(5, 16), random(5, 16, seed=1), random(16, seed=2)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    normed, new_residual = nn.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected.float())
    assert torch.equal(new_residual, x + residual)
    torch.testing.assert_close(nn.rms_norm(x + residual, weight, 1e-5), expected.float())


def test_norms_are_computed_in_float32() -> None:
    """The squares overflow float16."""
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)
    assert torch.equal(nn.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    q, k = random(3, 4, 8), random(3, 2, 8, seed=1)
    positions, inv_freq = torch.tensor([0, 1, 1000]).int(), torch.tensor([1.0, 0.3, 0.1, 0.01])
    cos, sin = nn.rope_tables(positions, inv_freq, 1.0)
    assert cos.shape == sin.shape == (3, 4)
    for given, rotated in zip((q, k), nn.rope(q, k, cos, sin), strict=True):
        turn = torch.polar(torch.ones(3, 1, 4).double(), positions[:, None, None] * inv_freq.double())
        turned = torch.complex(given[..., :4].double(), given[..., 4:].double()) * turn
        torch.testing.assert_close(rotated, torch.cat((turned.real, turned.imag), -1).float(), atol=1e-4, rtol=1e-4)


def test_rope_tables_are_scaled() -> None:
    cos, sin = nn.rope_tables(torch.tensor([3]).int(), torch.tensor([0.5]), 1.25)
    torch.testing.assert_close(cos, torch.tensor([[1.25 * math.cos(1.5)]]))
    torch.testing.assert_close(sin, torch.tensor([[1.25 * math.sin(1.5)]]))


def test_silu_mul_takes_the_gate_first() -> None:
    gate, up = random(3, 6), random(3, 6, seed=1)
    torch.testing.assert_close(nn.silu_mul(torch.cat((gate, up), -1)), gate * gate.sigmoid() * up)


def test_embedding_and_linear() -> None:
    table, weight, bias = random(10, 4), random(6, 4, seed=1), random(6, seed=2)
    x = nn.embedding(torch.tensor([3, 3, 9]).int(), table)
    assert torch.equal(x, table[[3, 3, 9]])
    torch.testing.assert_close(nn.linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(nn.linear(x, weight), x @ weight.T)


def test_a_kernel_set_is_active_inside_its_block_only() -> None:
    twins = [implementation(op) for op in OPS]
    with using(KernelSet.TORCH):
        assert [implementation(op) for op in OPS] == twins
    assert [implementation(op) for op in OPS] == twins
    assert all(twin.__name__ == op and twin.__module__.endswith("_torch") for op, twin in zip(OPS, twins, strict=True))
    assert set(OPS) == set(nn.__all__) | {"argmax", "log_sum_exp", "mask_logits", "top_k"}  # the sampler's
