"""The largest arguments that kernels take fit into SBUF and PSUM; strict mode measures it without computing."""

import nki
import numpy as np
import pytest

from vllm_neuron.kernels.gated_mlp import gated_mlp_kernel
from vllm_neuron.kernels.kv_write import kv_write_kernel
from vllm_neuron.kernels.norm_qkv_rope import norm_qkv_rope_kernel
from vllm_neuron.kernels.output_projection import output_projection_kernel
from vllm_neuron.kernels.rms_norm import add_rms_norm_kernel
from vllm_neuron.kernels.rope import rope_kernel
from vllm_neuron.kernels.top_k import SEARCH, top_k_kernel


def z(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


LARGEST = {
    "add_rms_norm": (add_rms_norm_kernel, (z(130, 8192), z(130, 8192), z(8192), 1e-5)),
    "rope of many heads": (rope_kernel, (z(128, 60, 128), z(128, 4, 128), z(128, 64), z(128, 64))),
    "rope of large heads": (rope_kernel, (z(128, 7, 1024), z(128, 1, 1024), z(128, 512), z(128, 512))),
    "kv_write": (
        kv_write_kernel,
        (z(9, 16, 64, 128), z(9, 16, 64, 128), z(130, 64, 128), z(130, 64, 128), z(130, dtype=np.int32)),
    ),
    "gated_mlp": (gated_mlp_kernel, (z(256, 8192), z(8192, 2 * 8192), z(8192, 8192))),
    "norm_qkv_rope": (
        norm_qkv_rope_kernel,
        (z(256, 8192), z(8192), 1e-5, z(8192, 12 * 128), z(256, 64), z(256, 64), 8),
    ),
    "output_projection": (output_projection_kernel, (z(256, 8192), z(8192, 1024))),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_arguments_fit(name):
    kernel, arguments = LARGEST[name]
    peak = nki.simulate(kernel).run(*arguments, values=False).peak
    assert peak["sbuf"] >= 2**15


def test_the_largest_search_fits():
    logits = np.random.default_rng(0).standard_normal((2, 4 * SEARCH)).astype(np.float32)
    values, indices = nki.simulate(top_k_kernel)(logits, 256)
    assert (np.take_along_axis(logits, indices, 1) == values).all()
    assert (values == -np.sort(-logits)[:, :256]).all()
