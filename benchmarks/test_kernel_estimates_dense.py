"""Estimated makespan of the kernels that are not attention, against their roofline on trn2.

    python -m pytest benchmarks/test_kernel_estimates_dense.py -s --benchmark-disable

Estimates from documented formulas, not measurements: docs/nki-simulator.md. Sizes are those of one core of eight
(tensor parallel) of a model with hidden size 4096, 32 + 8 heads of 128, intermediate size 14336 and a vocabulary of
131072, in bfloat16, with logits in float32. A roofline is the larger of the products at the peak of the Tensor Engine
and of the HBM traffic that cannot be avoided at the core's share. What the benchmark itself times is the simulator.

Farthest from their roofline are

- everything that moves a few KiB: a load and a store take 2 us whatever they move;
- top_k: the logits are searched k / 8 times in three passes, at one element a cycle and partition, and the candidates
  once more (their number grows with the pieces that the first search is cut into);
- kv_write: the GpSimd Engine generates the descriptors of what goes to slots known at run time only, 600 ns for 128
  tokens and cache (an assumption of the cost model: no document says what it takes), and a descriptor moves 256 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from vllm_neuron.kernels import simulator

assert simulator.install(), "the real nki package is installed: estimates are of the simulator"

import nki  # noqa: E402

from vllm_neuron.kernels.gated_mlp import gated_mlp_kernel  # noqa: E402
from vllm_neuron.kernels.kv_fp8 import kv_dequantize_kernel, kv_quantize_kernel  # noqa: E402
from vllm_neuron.kernels.kv_write import kv_write_kernel  # noqa: E402
from vllm_neuron.kernels.norm_qkv_rope import norm_qkv_rope_kernel  # noqa: E402
from vllm_neuron.kernels.output_projection import output_projection_kernel  # noqa: E402
from vllm_neuron.kernels.rms_norm import add_rms_norm_kernel, rms_norm_kernel  # noqa: E402
from vllm_neuron.kernels.rope import rope_kernel  # noqa: E402
from vllm_neuron.kernels.simulator.report import estimate  # noqa: E402
from vllm_neuron.kernels.simulator.targets import TRN2  # noqa: E402
from vllm_neuron.kernels.top_k import top_k_kernel  # noqa: E402

BF16, FP32, INT32, UINT8 = ml_dtypes.bfloat16, np.float32, np.int32, np.uint8
HIDDEN, INNER, VOCABULARY, DIM = 4096, 14336 // 8, 131072 // 8, 128
HEADS, KV_HEADS = 4, 1
PEAK_TFLOPS = 2 * 128 * 128 * TRN2.clock_ghz["tensor"] / 1e3


def z(*shape: int, dtype: Any = BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


@dataclass(frozen=True)
class Case:
    """A kernel at a number of tokens.

    Attributes:
        kernel: in NKI.
        arguments: of it.
        mib: of HBM traffic that cannot be avoided, in MiB.
        gflop: of products.
    """

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    mib: float
    gflop: float = 0.0

    @property
    def roofline_us(self) -> float:
        return max(self.mib * 2**20 / TRN2.hbm_gbps / 1e3, self.gflop / PEAK_TFLOPS * 1e3)


def megabytes(*arrays: np.ndarray) -> float:
    return sum(array.nbytes for array in arrays) / 2**20


def cases(t: int) -> dict[str, Case]:
    """All kernels at t tokens."""
    x, table, q, k = z(t, HIDDEN), z(t, DIM // 2, dtype=FP32), z(t, HEADS, DIM), z(t, KV_HEADS, DIM)
    gate_up, down = z(HIDDEN, 2 * INNER), z(INNER, HIDDEN)
    qkv, out = z(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM), z(HEADS * DIM, HIDDEN)
    cache, slots = z(128, 32, KV_HEADS, DIM), np.arange(t, dtype=INT32)
    logits = np.random.default_rng(0).standard_normal((t, VOCABULARY)).astype(FP32)
    rows, heads, scale = z(t * KV_HEADS, DIM), z(t, HEADS * DIM), z(1, dtype=FP32)
    found = {
        "rms_norm": Case(rms_norm_kernel, (x, x[0], 1e-5), megabytes(x, x)),
        "add_rms_norm": Case(add_rms_norm_kernel, (x, x, x[0], 1e-5), megabytes(x, x, x, x)),
        "rope": Case(rope_kernel, (q, k, table, table), megabytes(q, q, k, k, table, table)),
        "kv_write": Case(kv_write_kernel, (cache, cache.copy(), k, k, slots), megabytes(k, k, k, k)),
        "gated_mlp": Case(
            gated_mlp_kernel, (x, gate_up, down), megabytes(x, x, gate_up, down), t * 6 * HIDDEN * INNER / 1e9
        ),
        "norm_qkv_rope": Case(
            norm_qkv_rope_kernel,
            (x, x[0], 1e-5, qkv, table, table, HEADS),
            megabytes(x, qkv, table, table, q, k, k),
            2 * t * qkv.size / 1e9,
        ),
        "output_projection": Case(
            output_projection_kernel, (heads, out), megabytes(heads, out, x), 2 * t * out.size / 1e9
        ),
        "kv_quantize": Case(kv_quantize_kernel, (rows, scale, scale), megabytes(rows) * 1.5),
        "kv_dequantize": Case(kv_dequantize_kernel, (rows.astype(UINT8), scale, "bfloat16"), megabytes(rows) * 1.5),
    }
    if t <= 16:
        found["argmax"] = Case(top_k_kernel, (logits, 1), megabytes(logits))
        found["top_k of 64"] = Case(top_k_kernel, (logits, 64), megabytes(logits))
    return found


LEAST = {
    "rms_norm": 0.85,
    "add_rms_norm": 0.85,
    "rope": 0.55,
    "gated_mlp": 0.85,
    "norm_qkv_rope": 0.65,
    "output_projection": 0.55,
}
"""Share of the roofline that an estimate reaches at least, where there is enough work (2048 tokens, or 10 us)."""
CASES = {f"{name}, {t} tokens": case for t in (1, 16, 2048) for name, case in cases(t).items()}


@pytest.mark.parametrize("name", CASES)
def test_estimate(benchmark, name):
    """Prints the estimate beside the roofline, and holds it to a share of the roofline where there is work enough."""
    case = CASES[name]
    # Only searches depend on values; everything else is traced without computing.
    values = case.kernel is top_k_kernel
    run = benchmark.pedantic(
        lambda: nki.simulate(case.kernel).run(*case.arguments, trace=True, values=values), rounds=1
    )
    report = estimate(run)
    share = case.roofline_us / report.makespan_us
    benchmark.extra_info.update(estimated_us=report.makespan_us, roofline_us=case.roofline_us, bound=report.bound)
    print(
        f"\n{name}: {report.makespan_us:.1f} us estimated, roofline {case.roofline_us:.1f} us ({share:.0%}), "
        f"bound by {report.bound} ({report.busy[report.bound]:.0%} busy), {report.instructions} instructions"
    )
    assert report.makespan_us >= case.roofline_us
    if "2048" in name or case.roofline_us > 10:
        assert share >= LEAST.get(name.split(",")[0], 0.0)
