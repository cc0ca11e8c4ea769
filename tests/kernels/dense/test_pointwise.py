"""rms_norm, rope, the KV-cache write and 8-bit KV against their torch twins."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.kernels import kv_fp8, kv_fp8_torch, kv_write_torch, rms_norm_torch, rope_torch
from vllm_neuron.kernels.kv_write import kv_write
from vllm_neuron.kernels.rms_norm import add_rms_norm, rms_norm
from vllm_neuron.kernels.rope import rope

from .compare import cores, dtypes, few, identical, normal, same, tables, tokens

LIMIT = torch.tensor([240.0])
hidden_sizes = st.sampled_from([1, 7, 32, 50, 96, 576, 1024]) | st.integers(1, 600)


@few
@given(tokens(), hidden_sizes, dtypes, cores)
def test_rms_norm_is_its_twin(rows, hidden, dtype, lnc):
    x, weight = normal(rows, hidden, dtype=dtype), normal(hidden, dtype=dtype)
    same([rms_norm(x, weight, 1e-5, lnc=lnc)], [rms_norm_torch.rms_norm(x, weight, 1e-5)])


@few
@given(tokens(), hidden_sizes, dtypes, cores)
def test_add_rms_norm_is_its_twin(rows, hidden, dtype, lnc):
    x, residual, weight = (
        normal(rows, hidden, dtype=dtype),
        normal(rows, hidden, dtype=dtype),
        normal(hidden, dtype=dtype),
    )
    same(add_rms_norm(x, residual, weight, 1e-5, lnc=lnc), rms_norm_torch.add_rms_norm(x, residual, weight, 1e-5))


def test_rms_norm_of_many_dimensions():
    x, weight = normal(2, 3, 64), normal(64)
    same([rms_norm(x, weight, 1e-5)], [rms_norm_torch.rms_norm(x, weight, 1e-5)])


@few
@given(tokens(), st.integers(1, 12), st.integers(1, 4), st.sampled_from([2, 16, 64, 128, 130]), dtypes, cores)
def test_rope_is_its_twin(rows, heads, kv_heads, dim, dtype, lnc):
    q, k = normal(rows, heads, dim, dtype=dtype), normal(rows, kv_heads, dim, dtype=dtype)
    cos, sin = tables(rows, dim // 2)
    same(rope(q, k, cos, sin, lnc=lnc), rope_torch.rope(q, k, cos, sin))


@few
@given(tokens(), st.integers(1, 4), st.sampled_from([1, 16, 64]), st.sampled_from([1, 16, 32]), dtypes, cores)
def test_kv_write_is_its_twin_in_place(rows, heads, dim, block_size, dtype, lnc):
    blocks = rows // block_size + 3
    caches = [normal(blocks, block_size, heads, dim, dtype=dtype) for _ in range(2)]
    k, v = normal(rows, heads, dim, dtype=dtype), normal(rows, heads, dim, dtype=dtype, scale=2.0)
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(rows))[:rows].int()
    wanted = kv_write_torch.kv_write(*(cache.clone() for cache in caches), k, v, slots)
    identical(kv_write(*caches, k, v, slots, lnc=lnc), wanted)
    identical(caches, wanted)


@few
@given(tokens(), st.integers(1, 4), st.sampled_from([1, 7, 64, 128]), st.floats(0.01, 4.0), dtypes, cores)
def test_kv_quantize_and_kv_dequantize_are_their_twins(rows, heads, dim, factor, dtype, lnc):
    x, scale = normal(rows, heads, dim, dtype=dtype, scale=100.0), torch.tensor([factor])
    wanted = kv_fp8_torch.kv_quantize(x, scale, LIMIT)
    values = kv_fp8.kv_quantize(x, scale, LIMIT, lnc=lnc)
    identical([values], [wanted])
    identical([kv_fp8.kv_dequantize(values, scale, dtype, lnc=lnc)], [kv_fp8_torch.kv_dequantize(wanted, scale, dtype)])


def test_kv_quantize_clamps_to_what_trainium_2_has():
    x = torch.tensor([[[1000.0, -1000.0, 240.0, 0.0]]])
    assert kv_fp8.kv_quantize(x, torch.ones(1), LIMIT).float().tolist() == [[[240.0, -240.0, 240.0, 0.0]]]


def test_rope_of_many_heads_goes_through_psum_in_groups():
    q, k = normal(3, 40, 128), normal(3, 8, 128)
    cos, sin = tables(3, 64)
    same(rope(q, k, cos, sin), rope_torch.rope(q, k, cos, sin))
