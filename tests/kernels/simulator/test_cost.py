"""The cost model against documented formulas, and against published measurements on trn2."""

import re
import xml.etree.ElementTree as xml

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from vllm_neuron.kernels.simulator.cost import ACCESS_LATENCY, DMA_DESCRIPTOR, LOAD_STATIONARY, cost
from vllm_neuron.kernels.simulator.report import Report, estimate
from vllm_neuron.kernels.simulator.targets import TRN2
from vllm_neuron.kernels.simulator.timeline import timeline

BF16 = ml_dtypes.bfloat16
P, N = 128, 512


def run(kernel, *arrays, values=True) -> Report:
    return estimate(nki.simulate(kernel).run(*arrays, trace=True, values=values))


def cycles_of(kernel, name: str) -> float:
    """Cycles of the last instruction of a name, without loading weights."""
    trace = nki.simulate(kernel).run(trace=True).traces[0]
    instruction = [i for i in trace if i.name == name][-1]
    return cost(instruction, TRN2, same_weights=True).ns * TRN2.clock_ghz[instruction.engine]


def sb(shape, dtype="bfloat16"):
    return nl.ones(shape, dtype)


def matmul(dtype):
    def kernel():
        nisa.nc_matmul(nl.ndarray((P, N), nl.float32, nl.psum), sb((P, P), dtype), sb((P, N), dtype), accumulate=False)

    return kernel


def copy_bf16():
    nisa.tensor_copy(nl.ndarray((P, N), nl.bfloat16), sb((P, N)))


def copy_strided():
    nisa.tensor_copy(nl.ndarray((P, N), nl.bfloat16), sb((P, 2 * N))[:, 0 : 2 * N : 2])


def copy_float32():
    nisa.tensor_copy(nl.ndarray((P, N), nl.float32), sb((P, N), "float32"))


def copy_from_psum():
    nisa.tensor_copy(nl.ndarray((P, N), nl.bfloat16), nl.ones((P, N), nl.bfloat16, nl.psum))


def copy_strided_from_psum():
    nisa.tensor_copy(nl.ndarray((P, N // 2), nl.bfloat16), nl.ones((P, N), nl.bfloat16, nl.psum)[:, 0:N:2])


def add_bf16():
    nisa.tensor_tensor(nl.ndarray((P, N), nl.bfloat16), sb((P, N)), sb((P, N)), nl.add)


def add_float32():
    nisa.tensor_tensor(nl.ndarray((P, N), nl.float32), sb((P, N), "float32"), sb((P, N), "float32"), nl.add)


def small_add():
    nisa.tensor_tensor(nl.ndarray((P, 4), nl.bfloat16), sb((P, 4)), sb((P, 4)), nl.add)


def exponentials():
    nisa.activation(nl.ndarray((P, N), nl.bfloat16), nl.exp, sb((P, N), "float32"))


def reciprocals():
    nisa.reciprocal(nl.ndarray((P, N), nl.float32), sb((P, N), "float32"))


def row_maximum():
    nisa.tensor_reduce(nl.ndarray((P, 1), nl.float32), nl.maximum, sb((P, N), "float32"), axis=1)


def row_maximum_bf16():
    nisa.tensor_reduce(nl.ndarray((P, 1), nl.float32), nl.maximum, sb((P, N)), axis=1)


def counting():
    nisa.iota(nl.ndarray((P, N), nl.int32), [[1, N]])


def transposing():
    nisa.nc_transpose(nl.ndarray((P, P), nl.bfloat16, nl.psum), sb((P, P)))


@pytest.mark.parametrize(
    ("kernel", "name", "cycles"),
    [
        pytest.param(matmul("bfloat16"), "nc_matmul", N, id="matmul bf16"),
        pytest.param(matmul("float32"), "nc_matmul", 4 * N, id="matmul fp32"),
        (copy_bf16, "tensor_copy", N / 4),
        (copy_strided, "tensor_copy", N / 2),
        (copy_from_psum, "tensor_copy", N / 2),
        (copy_strided_from_psum, "tensor_copy", N / 2),
        (copy_float32, "tensor_copy", N),
        (add_bf16, "tensor_tensor", N),
        (add_float32, "tensor_tensor", 2 * N),
        (small_add, "tensor_tensor", 64),
        (exponentials, "activation", N),
        (reciprocals, "reciprocal", 8 * N),
        (row_maximum, "tensor_reduce", N),
        (row_maximum_bf16, "tensor_reduce", N / 2),
        (counting, "iota", 150 + N),
        (transposing, "nc_transpose", P),
    ],
)
def test_cycles_are_those_of_the_documented_formula(kernel, name, cycles):
    assert cycles_of(kernel, name) == pytest.approx(cycles)


@pytest.mark.parametrize(("row", "least", "most"), [(256, 0.05, 0.5), (2048, 0.75, 1), (8192, 0.9, 1)])
def test_dma_rate_by_bytes_per_row(row, least, most):
    """The bandwidth guide: below 256 B a small fraction of the peak, from 2 KiB on close to it."""

    def kernel(a):
        result = nl.ndarray((1,), nl.uint8, nl.shared_hbm)
        for i in nl.affine_range(a.shape[0] // P):
            nisa.dma_copy(nl.ndarray((P, row), nl.uint8), a[i * P : (i + 1) * P])
        nisa.dma_copy(result, a[0:1, 0])
        return result

    report = run(kernel, np.zeros((64 * P, row), np.uint8))
    peak = min(TRN2.dma_engine_gbps * TRN2.dma_engines, TRN2.hbm_gbps)
    assert least < report.hbm_gbps / peak < most


def test_rows_of_a_gather_are_as_long_as_those_of_a_copy():
    """Its indexes are an operand, but not what moves."""

    def kernel(a, rows):
        index, tile = nl.ndarray((P, 1), nl.int32), nl.ndarray((P, 4096), nl.uint8)
        nisa.dma_copy(index, rows)
        nisa.dma_copy(tile, a.ap([[4096, P], [1, 4096]], vector_offset=index))

    trace = nki.simulate(kernel).run(np.zeros((P, 4096), np.uint8), np.arange(P, dtype=np.int32), trace=True).traces[0]
    rate = TRN2.hbm_gbps / TRN2.dma_engines
    assert cost(trace[-1], TRN2).ns == pytest.approx(8 * (4096 / rate + DMA_DESCRIPTOR))


def test_engines_work_side_by_side_and_wait_for_what_they_read():
    def independent(a):
        result = nl.ndarray((P, N), nl.float32, nl.shared_hbm)
        one, two = sb((P, N), "float32"), nl.ndarray((P, N), nl.float32)
        for _ in nl.affine_range(50):
            nisa.activation(nl.ndarray((P, N), nl.float32), nl.exp, one)
            nisa.tensor_reduce(nl.ndarray((P, 1), nl.float32), nl.add, one, axis=1)
        nisa.tensor_copy(two, one)
        nisa.dma_copy(result, two)
        return result

    def chained(a):
        result, tile = nl.ndarray((P, N), nl.float32, nl.shared_hbm), sb((P, N), "float32")
        for _ in nl.affine_range(50):
            nisa.activation(tile, nl.exp, tile)
            nisa.tensor_scalar(tile, tile, nl.minimum, 1.0)
        nisa.dma_copy(result, tile)
        return result

    a = np.zeros((1, 1), np.float32)
    fast, slow = run(independent, a), run(chained, a)
    assert fast.busy["vector"] > 0.9 and fast.bound == "vector"
    assert slow.makespan_us > 1.6 * fast.makespan_us


def test_buffers_rotate_within_the_capacity_only():
    """Loads run ahead of the computation, but no further than SBUF is large."""

    def kernel(a):
        result, total = nl.ndarray((P, 1), nl.float32, nl.shared_hbm), nl.zeros((P, 1), nl.float32)
        for _ in nl.affine_range(8):
            tile = nl.ndarray((P, 17000), nl.float32)
            nisa.dma_copy(tile, a)
            nisa.tensor_reduce(total, nl.add, tile, axis=1)
        nisa.dma_copy(result, total)
        return result

    timeline_ = run(kernel, np.zeros((P, 17000), np.float32)).timelines[0]
    loads = [p for p in timeline_ if p.engine == "dma"][:8]
    sums = [p for p in timeline_ if p.instruction.name == "tensor_reduce"]
    assert loads[2].start < sums[1].end, "three tiles fit"
    assert loads[3].end > sums[0].end, "the fourth waits for the first"


# A matrix product of 2048 x 2048 x 2048, by how its loads and its accumulators are arranged.


def serial(a, b):
    """One buffer per operand, loaded before every matmul."""
    result = nl.ndarray((a.shape[1], b.shape[1]), nl.bfloat16, nl.shared_hbm)
    left, right = nl.ndarray((P, P), a.dtype), nl.ndarray((P, N), b.dtype)
    for m in nl.affine_range(a.shape[1] // P):
        for n in nl.affine_range(b.shape[1] // N):
            group, tile = nl.ndarray((P, N), nl.float32, nl.psum), nl.ndarray((P, N), nl.bfloat16)
            for k in nl.affine_range(a.shape[0] // P):
                nisa.dma_copy(left, a[nl.ds(k * P, P), nl.ds(m * P, P)])
                nisa.dma_copy(right, b[nl.ds(k * P, P), nl.ds(n * N, N)])
                nisa.nc_matmul(group, left, right, accumulate=(k > 0))
            nisa.tensor_copy(tile, group)
            nisa.dma_copy(result[nl.ds(m * P, P), nl.ds(n * N, N)], tile)
    return result


def resident(a, b, accumulators):
    """Both operands in SBUF first, then one or two accumulators of a row of tiles, drained in turn."""
    depth = a.shape[0] // P
    result = nl.ndarray((a.shape[1], b.shape[1]), nl.bfloat16, nl.shared_hbm)
    left, right = nl.ndarray((P, depth, a.shape[1]), a.dtype), nl.ndarray((P, depth, b.shape[1]), b.dtype)
    for k in nl.affine_range(depth):
        nisa.dma_copy(left[:, k, :], a[nl.ds(k * P, P), :])
        nisa.dma_copy(right[:, k, :], b[nl.ds(k * P, P), :])
    groups = nl.ndarray((P, accumulators, b.shape[1]), nl.float32, nl.psum)
    for m in nl.affine_range(a.shape[1] // P):
        group, row = groups[:, m % accumulators, :], nl.ndarray((P, b.shape[1]), nl.bfloat16)
        for n in nl.affine_range(b.shape[1] // N):
            for k in nl.affine_range(depth):
                columns = right[:, k, nl.ds(n * N, N)]
                nisa.nc_matmul(group[:, nl.ds(n * N, N)], left[:, k, nl.ds(m * P, P)], columns, accumulate=(k > 0))
        nisa.tensor_copy(row, group)
        nisa.dma_copy(result[nl.ds(m * P, P), :], row)
    return result


def streamed(a, b):
    """Blocks of columns streamed beside the computation, the left operand during the first of them."""
    depth, block = a.shape[0] // P, min(4 * P, a.shape[1])
    result = nl.ndarray((a.shape[1], b.shape[1]), nl.bfloat16, nl.shared_hbm)
    left = nl.ndarray((P, depth, a.shape[1]), a.dtype)
    for n in nl.affine_range(b.shape[1] // N):
        right = nl.ndarray((P, depth, N), b.dtype)
        for k in nl.affine_range(depth):
            nisa.dma_copy(right[:, k, :], b[nl.ds(k * P, P), nl.ds(n * N, N)])
        for m in nl.affine_range(a.shape[1] // P):
            if n == 0 and m % 4 == 0:
                for k in nl.affine_range(depth):
                    nisa.dma_copy(left[:, k, nl.ds(m * P, block)], a[nl.ds(k * P, P), nl.ds(m * P, block)])
            group, tile = nl.ndarray((P, N), nl.float32, nl.psum), nl.ndarray((P, N), nl.bfloat16)
            for k in nl.affine_range(depth):
                nisa.nc_matmul(group, left[:, k, nl.ds(m * P, P)], right[:, k, :], accumulate=(k > 0))
            nisa.tensor_copy(tile, group)
            nisa.dma_copy(result[nl.ds(m * P, P), nl.ds(n * N, N)], tile)
    return result


PUBLISHED = {"serial": 0.16, "one accumulator": 0.595, "two accumulators": 0.837, "streamed": 0.909}
"""Share of the peak that nki-autotune measured on trn2, by what its kernels do."""


def test_ladder_of_matrix_products_is_in_order_and_within_a_fifth():
    a, b = (np.ones((2048, 2048), BF16) for _ in range(2))
    kernels = {
        "serial": (serial, a, b),
        "one accumulator": (resident, a, b, 1),
        "two accumulators": (resident, a, b, 2),
        "streamed": (streamed, a, b),
    }
    found = {name: run(kernel, *arguments, values=False).utilization for name, (kernel, *arguments) in kernels.items()}
    assert list(found) == sorted(found, key=lambda name: found[name])
    for name, published in PUBLISHED.items():
        assert found[name] == pytest.approx(published, rel=0.2), name


def test_estimates_do_not_need_values():
    a, b = np.ones((256, 256), BF16), np.ones((256, 512), BF16)
    with_values, without = run(streamed, a, b), run(streamed, a, b, values=False)
    assert without.makespan_us == with_values.makespan_us and without.busy == with_values.busy
    assert nki.simulate(streamed).run(a, b, values=False).outputs is None


def test_peak_and_traffic_of_one_product():
    def kernel(a, b):
        left, right, tile = nl.ndarray((P, P), a.dtype), nl.ndarray((P, N), b.dtype), nl.ndarray((P, N), nl.bfloat16)
        result, group = nl.ndarray((P, N), nl.bfloat16, nl.shared_hbm), nl.ndarray((P, N), nl.float32, nl.psum)
        nisa.dma_copy(left, a)
        nisa.dma_copy(right, b)
        nisa.nc_matmul(group, left, right, accumulate=False)
        nisa.tensor_copy(tile, group)
        nisa.dma_copy(result, tile)
        return result

    report = run(kernel, np.ones((P, P), BF16), np.ones((P, N), BF16))
    assert report.flops == 2 * P * P * N
    assert report.hbm_bytes == 2 * (P * P + P * N + P * N)
    assert report.instructions == 5 and report.cores == 1
    (product,) = (p for p in report.timelines[0] if p.instruction.name == "nc_matmul")
    assert (product.end - product.start) * 2.4 == pytest.approx(N + LOAD_STATIONARY)
    assert product.cost.latency == pytest.approx(ACCESS_LATENCY / 2.4)


def test_reports_and_pictures_say_that_they_are_estimates():
    report = run(add_and_store)
    assert "estimate from documented formulas, not a measurement" in str(report)
    picture = timeline(report)
    assert "estimate from documented formulas, not a measurement" in picture
    titles = [t.text or "" for t in xml.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]
    assert any(re.match(r"tensor_tensor [\d.]+ to [\d.]+ us", t) for t in titles)


def add_and_store():
    result, total = nl.ndarray((P, N), nl.bfloat16, nl.shared_hbm), nl.ndarray((P, N), nl.bfloat16)
    nisa.tensor_tensor(total, sb((P, N)), sb((P, N)), nl.add)
    nisa.dma_copy(result, total)
    return result


def test_an_estimate_needs_a_trace():
    with pytest.raises(ValueError, match="trace=True"):
        estimate(nki.simulate(add_and_store).run())
