"""The kernels with weights against their torch twins."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.kernels import gated_mlp_torch, norm_qkv_rope_torch, output_projection_torch
from vllm_neuron.kernels.gated_mlp import gated_mlp
from vllm_neuron.kernels.norm_qkv_rope import norm_qkv_rope
from vllm_neuron.kernels.output_projection import output_projection

from .compare import cores, dtypes, few, normal, same, tables, tokens

widths = st.sampled_from([1, 64, 96, 128, 192, 576]) | st.integers(1, 24).map(lambda n: 16 * n)


@few
@given(tokens(600), widths, widths, dtypes, cores)
def test_gated_mlp_is_its_twin(rows, hidden, inner, dtype, lnc):
    x = normal(rows, hidden, dtype=dtype)
    gate_up = normal(hidden, 2 * inner, dtype=dtype, scale=hidden**-0.5)
    down = normal(inner, hidden, dtype=dtype, scale=inner**-0.5)
    same([gated_mlp(x, gate_up, down, lnc=lnc)], [gated_mlp_torch.gated_mlp(x, gate_up, down)])


@few
@given(tokens(600), widths, st.integers(1, 9), st.integers(1, 4), st.sampled_from([2, 16, 64, 128, 200]), dtypes, cores)
def test_norm_qkv_rope_is_its_twin(rows, hidden, heads, kv_heads, dim, dtype, lnc):
    x, gamma = normal(rows, hidden, dtype=dtype), normal(hidden, dtype=dtype)
    weight = normal(hidden, (heads + 2 * kv_heads) * dim, dtype=dtype, scale=hidden**-0.5)
    arguments = (x, gamma, 1e-5, weight, *tables(rows, dim // 2), heads)
    same(norm_qkv_rope(*arguments, lnc=lnc), norm_qkv_rope_torch.norm_qkv_rope(*arguments))


@few
@given(tokens(600), st.integers(1, 9), st.sampled_from([1, 16, 64]), st.integers(1, 1200), dtypes, cores)
def test_output_projection_is_its_twin(rows, heads, dim, hidden, dtype, lnc):
    x = normal(rows, heads, dim, dtype=dtype)
    weight = normal(heads * dim, hidden, dtype=dtype, scale=(heads * dim) ** -0.5)
    same([output_projection(x, weight, lnc=lnc)], [output_projection_torch.output_projection(x, weight)])


def test_weights_that_do_not_stay_in_sbuf_are_streamed_for_every_block():
    x = normal(260, 8, 128)
    weight = normal(1024, 2304, scale=1024**-0.5)
    same([output_projection(x, weight)], [output_projection_torch.output_projection(x, weight)])
