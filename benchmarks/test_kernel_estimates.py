"""Estimated makespan of the attention kernels against their roofline on trn2.

    python -m pytest benchmarks/test_kernel_estimates.py -s --benchmark-disable

Estimates from documented formulas, not measurements: docs/nki-simulator.md. One core has 8 KV heads of 128 with 4 query
heads each, in bfloat16, in blocks of 32. What the benchmark itself times is the simulator.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from vllm_neuron.kernels import simulator

assert simulator.install(), "the real nki package is installed: estimates are of the simulator"

import nki  # noqa: E402

from vllm_neuron.kernels.decode_mask import decode_mask_kernel  # noqa: E402
from vllm_neuron.kernels.paged_decode_attention import paged_decode_attention_kernel  # noqa: E402
from vllm_neuron.kernels.paged_prefill_attention import paged_prefill_attention_kernel  # noqa: E402
from vllm_neuron.kernels.simulator.report import Report, estimate  # noqa: E402
from vllm_neuron.kernels.simulator.targets import TRN2  # noqa: E402

KV_HEADS, GROUP, DIM, BLOCK_SIZE = 8, 4, 128, 32


def arguments(requests: int, rows: int, context: int) -> tuple[Any, ...]:
    """Of `paged_attention`, with the last `rows` positions of each context."""
    columns = context // BLOCK_SIZE
    cache = np.zeros((requests * columns, BLOCK_SIZE, KV_HEADS, DIM), ml_dtypes.bfloat16)
    table = np.arange(requests * columns, dtype=np.int32).reshape(requests, columns)
    positions = np.tile(np.arange(context - rows, context, dtype=np.int32), requests)
    q = np.zeros((requests * rows, KV_HEADS * GROUP, DIM), ml_dtypes.bfloat16)
    return q, cache, cache.copy(), table, positions, DIM**-0.5


def estimated(benchmark: Any, kernel: Any, *args: Any) -> Report:
    return benchmark.pedantic(lambda: estimate(nki.simulate(kernel).run(*args, trace=True, values=False)), rounds=1)


def share_of(report: Report, roofline_us: float, benchmark: Any) -> float:
    share = roofline_us / report.makespan_us
    benchmark.extra_info["share of the roofline"] = round(share, 3)
    print(f"\n{share:.0%} of a roofline of {roofline_us:.1f} us\n{report}")
    return share


@pytest.mark.parametrize("context", [2048, 8192])
@pytest.mark.parametrize("requests", [1, 16])
def test_decode_attention(benchmark: Any, requests: int, context: int) -> None:
    """Bound by reading the cache."""
    report = estimated(benchmark, paged_decode_attention_kernel, *arguments(requests, 1, context))
    roofline_us = 2 * requests * context * KV_HEADS * DIM * 2 / TRN2.hbm_gbps / 1e3
    assert share_of(report, roofline_us, benchmark) > 0.7


@pytest.mark.parametrize("context", [2048, 8192])
def test_prefill_attention(benchmark: Any, context: int) -> None:
    """A segment of 512 tokens, of which all of the context counts: the kernel cannot skip what it masks."""
    report = estimated(benchmark, paged_prefill_attention_kernel, *arguments(1, 512, context))
    peak_tflops = 2 * 128 * 128 * TRN2.clock_ghz["tensor"] / 1e3
    roofline_us = 4 * 512 * context * KV_HEADS * GROUP * DIM / peak_tflops / 1e6
    assert share_of(report, roofline_us, benchmark) > 0.55


@pytest.mark.parametrize("context", [2048, 8192])
@pytest.mark.parametrize("requests", [1, 16])
def test_decode_mask(benchmark: Any, requests: int, context: int) -> None:
    """A chain of few small instructions, whose latencies are all that counts: far from the bandwidth of its output."""
    report = estimated(benchmark, decode_mask_kernel, np.zeros(requests, np.int32), context)
    share_of(report, requests * context / TRN2.hbm_gbps / 1e3, benchmark)
    assert report.makespan_us < 15
