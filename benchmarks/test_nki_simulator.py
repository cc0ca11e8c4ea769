"""How fast the NKI simulator is: `python -m pytest benchmarks/test_nki_simulator.py`.

It says nothing about Neuron devices.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from vllm_neuron.kernels import simulator

assert simulator.install(), "the real nki package is installed: this measures the simulator"

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

from vllm_neuron.kernels.paged_prefill_attention import paged_prefill_attention_kernel  # noqa: E402

P, N = 128, 512
CACHE = (32, 32, 8, 128)


def product(a: Any, b: Any) -> Any:
    """a.T @ b, by tiles."""
    result = nl.ndarray((a.shape[1], b.shape[1]), nl.bfloat16, nl.shared_hbm)
    for m in nl.affine_range(a.shape[1] // P):
        for n in nl.affine_range(b.shape[1] // N):
            group, tile = nl.ndarray((P, N), nl.float32, nl.psum), nl.ndarray((P, N), nl.bfloat16)
            for k in nl.affine_range(a.shape[0] // P):
                left, right = nl.ndarray((P, P), a.dtype), nl.ndarray((P, N), b.dtype)
                nisa.dma_copy(left, a[nl.ds(k * P, P), nl.ds(m * P, P)])
                nisa.dma_copy(right, b[nl.ds(k * P, P), nl.ds(n * N, N)])
                nisa.nc_matmul(group, left, right, accumulate=(k > 0))
            nisa.tensor_copy(tile, group)
            nisa.dma_copy(result[nl.ds(m * P, P), nl.ds(n * N, N)], tile)
    return result


@pytest.mark.parametrize("values", [True, False], ids=["computing", "tracing"])
def test_instructions_per_second(benchmark: Any, values: bool) -> None:
    a, b = np.ones((512, 1024), ml_dtypes.bfloat16), np.ones((512, 1024), ml_dtypes.bfloat16)
    run = benchmark(lambda: nki.simulate(product).run(a, b, trace=not values, values=values))
    benchmark.extra_info["instructions_per_second"] = run.instructions / benchmark.stats.stats.median


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bfloat16", "float32"])
def test_prefill_attention_of_1024_tokens(benchmark: Any, dtype: Any) -> None:
    """8 query heads of 128, each with a KV head of its own."""
    random = np.random.default_rng(0)
    q, k_cache, v_cache = (random.standard_normal(shape).astype(dtype) for shape in ((1024, 8, 128), *2 * [CACHE]))
    table, positions = np.arange(32, dtype=np.int32)[None], np.arange(1024, dtype=np.int32)
    arguments = q, k_cache, v_cache, table, positions, 128**-0.5
    run = benchmark.pedantic(lambda: nki.simulate(paged_prefill_attention_kernel).run(*arguments), rounds=3)
    benchmark.extra_info["instructions_per_second"] = run.instructions / benchmark.stats.stats.median
    assert benchmark.stats.stats.median < 20
