"""Each instruction against NumPy, written from the formulas of its documentation."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from scipy import special

BF16 = ml_dtypes.bfloat16
RANDOM = np.random.default_rng(7)


def normal(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def integers(*shape, dtype=np.int32, low=-50, high=50):
    return RANDOM.integers(low, high, shape).astype(dtype)


def tile(array):
    """A tensor of HBM in SBUF."""
    loaded = nl.ndarray(array.shape, array.dtype)
    nisa.dma_copy(loaded, array)
    return loaded


def out(result):
    """A tile as an output."""
    stored = nl.ndarray(result.shape, result.dtype, nl.shared_hbm)
    nisa.dma_copy(stored, result)
    return stored


def like(a, dtype=None):
    return nl.ndarray(a.shape, a.dtype if dtype == None else dtype)  # noqa: E711


def simulate(kernel, *arrays, **options):
    return nki.simulate(kernel, **options)(*arrays)


SIZES = [(1, 1), (3, 7), (33, 64), (128, 513)]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.int32, np.uint8])
def test_tensor_copy_keeps_bits(shape, dtype):
    def kernel(a):
        copied = like(a)
        nisa.tensor_copy(copied, tile(a))
        return out(copied)

    a = RANDOM.integers(0, 256, (*shape, np.dtype(dtype).itemsize)).astype(np.uint8).view(dtype).reshape(shape)
    assert simulate(kernel, a).tobytes() == a.tobytes()


BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "less": np.less, "less_equal": np.less_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "abs_max": lambda a, b: np.maximum(abs(a), abs(b)), "abs_min": lambda a, b: np.minimum(abs(a), abs(b)),
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_tensor_tensor_computes_in_float32(name, dtype):
    op = getattr(nl, name)

    def kernel(a, b):
        result = like(a)
        nisa.tensor_tensor(result, tile(a), tile(b), op)
        return out(result)

    a, b = np.rint(normal(33, 65) * 2).astype(dtype), normal(33, 65).astype(dtype)
    golden = BINARY[name](a.astype(np.float32), b.astype(np.float32)).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(simulate(kernel, a, b), golden)


def test_tensor_tensor_of_32_bit_integers_is_exact_on_gpsimd_only():
    def kernel(a, b):
        exact, rounded = like(a), like(a)
        nisa.tensor_tensor(exact, tile(a), tile(b), nl.add)
        nisa.tensor_tensor(rounded, tile(a), tile(b), nl.add, engine=nisa.engine.vector)
        return out(exact), out(rounded)

    a, b = np.full((2, 2), 2**24, np.int32), np.full((2, 2), 1, np.int32)
    exact, rounded = simulate(kernel, a, b)
    assert (exact == 2**24 + 1).all() and (rounded == 2**24).all()


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
def test_bitwise_operators_take_bit_patterns(name):
    op = getattr(nl, name)

    def kernel(a, b):
        result, scalar = like(a), like(a)
        nisa.tensor_tensor(result, tile(a), tile(b), op)
        nisa.tensor_scalar(scalar, tile(a), op, 3)
        return out(result), out(scalar)

    a, b = integers(5, 9), integers(5, 9, low=0, high=8)
    function = {"right_shift": lambda x, y: (x.view(np.uint32) >> y).astype(np.uint32).view(np.int32)}.get(
        name, getattr(np, name)
    )
    result, scalar = simulate(kernel, a, b)
    np.testing.assert_array_equal(result, function(a, b))
    np.testing.assert_array_equal(scalar, function(a, np.full_like(a, 3)))


def test_tensor_scalar_applies_two_operators_in_order():
    def kernel(a, v):
        column, straight, reversed_ = tile(v), like(a), like(a)
        nisa.tensor_scalar(straight, tile(a), nl.subtract, column, op1=nl.multiply, operand1=2.0)
        nisa.tensor_scalar(reversed_, tile(a), nl.subtract, column, reverse0=True, op1=nl.add, operand1=1.0)
        return out(straight), out(reversed_)

    a, v = normal(40, 12), normal(40, 1)
    straight, reversed_ = simulate(kernel, a, v)
    np.testing.assert_array_equal(straight, (a - v) * np.float32(2))
    np.testing.assert_array_equal(reversed_, (v - a) + np.float32(1))


def test_scalar_tensor_tensor():
    def kernel(a, v, b):
        result = like(a)
        nisa.scalar_tensor_tensor(result, tile(a), nl.multiply, tile(v), nl.subtract, tile(b), reverse1=True)
        return out(result)

    a, v, b = normal(40, 12), normal(40, 1), normal(40, 12)
    np.testing.assert_array_equal(simulate(kernel, a, v, b), b - a * v)


def test_float_to_integer_rounds_to_even_and_saturates():
    def kernel(a):
        result = like(a, nl.int8)
        nisa.tensor_copy(result, tile(a))
        return out(result)

    a = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -200.0, 3.49]], np.float32)
    assert simulate(kernel, a).tolist() == [[0, 2, 2, 0, -2, 127, -128, 3]]


ACTIVATIONS = {
    "copy": lambda x: x, "square": np.square, "exp": np.exp, "tanh": np.tanh, "erf": special.erf, "sign": np.sign,
    "sigmoid": special.expit, "relu": lambda x: np.maximum(x, 0), "silu": lambda x: x * special.expit(x),
    "gelu": lambda x: x * special.ndtr(x), "softplus": lambda x: np.log1p(np.exp(x)), "abs": np.abs, "arctan": np.arctan,
    "gelu_apprx_sigmoid": lambda x: x * special.expit(1.702 * x), "sin": np.sin,
    "gelu_apprx_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_scales_shifts_and_sums(name):
    op = getattr(nl, name)

    def kernel(a, scale, bias):
        result, total = like(a), nl.ndarray((a.shape[0], 1), nl.float32)
        nisa.activation(
            result, op, tile(a), bias=tile(bias), scale=tile(scale), reduce_op=nl.add, reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
        return out(result), out(total)

    a, scale, bias = normal(50, 20) * 0.5, normal(50, 1) * 0.5, normal(50, 1) * 0.5
    result, total = simulate(kernel, a, scale, bias)
    golden = ACTIVATIONS[name](a.astype(np.float64) * scale + bias)
    np.testing.assert_allclose(result, golden, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(total, golden.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt", "reciprocal"])
def test_activation_of_positive_numbers(name):
    op = getattr(nl, name)

    def kernel(a):
        result = like(a)
        nisa.activation(result, op, tile(a), bias=1e-3)
        return out(result)

    a = np.abs(normal(8, 8)) + np.float32(0.1)
    golden = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: x**-0.5, "reciprocal": lambda x: 1 / x}[name]
    np.testing.assert_allclose(simulate(kernel, a), golden(a + 1e-3), rtol=1e-5)


def test_activation_outside_of_its_range_is_noted():
    def kernel(a):
        result = like(a)
        nisa.activation(result, nl.sin, tile(a))
        return out(result)

    run = nki.simulate(kernel).run(np.full((1, 1), 9.0, np.float32))
    np.testing.assert_allclose(run.outputs, 27.65, rtol=1e-4)
    (note,) = run.notes
    assert "sin" in note and "invalid" in note


def test_scalar_registers_persist_over_activations():
    def kernel(a, b):
        total, scratch = nl.ndarray((a.shape[0], 1), nl.float32), like(a)
        nisa.activation(scratch, nl.exp, tile(a), reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.activation(
            scratch, nl.exp, tile(b), reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce
        )
        return out(total)

    a, b = normal(9, 11), normal(9, 11)
    golden = np.exp(a).sum(1, keepdims=True) + np.exp(b).sum(1, keepdims=True)
    np.testing.assert_allclose(simulate(kernel, a, b), golden, rtol=1e-5)


@pytest.mark.parametrize(("name", "function"), [("add", np.sum), ("multiply", np.prod), ("maximum", np.max), ("minimum", np.min)])
def test_tensor_reduce_of_the_last_axes(name, function):
    op = getattr(nl, name)

    def kernel(a):
        one, both = nl.ndarray((a.shape[0], a.shape[1]), nl.float32), nl.ndarray((a.shape[0], 1), nl.float32)
        nisa.tensor_reduce(one, op, tile(a), axis=2)
        nisa.tensor_reduce(both, op, tile(a), axis=(1, 2), negate=True)
        return out(one), out(both)

    a = normal(17, 3, 5)
    one, both = simulate(kernel, a)
    np.testing.assert_allclose(one, function(a, axis=2), rtol=1e-5)
    np.testing.assert_allclose(both, -function(a, axis=(1, 2))[:, None], rtol=1e-5)


def test_tensor_scalar_reduce_continues():
    def kernel(a):
        scratch, total = like(a), nl.ndarray((a.shape[0], 1), nl.float32)
        nisa.tensor_scalar_reduce(scratch, tile(a), nl.multiply, 2.0, nl.maximum)
        command = nisa.reduce_cmd.reduce
        nisa.tensor_scalar_reduce(scratch, tile(a), nl.multiply, -1.0, nl.maximum, total, reduce_cmd=command)
        return out(total)

    a = normal(6, 9)
    np.testing.assert_array_equal(simulate(kernel, a), np.maximum((a * 2).max(1), (-a).max(1))[:, None])


def test_tensor_scalar_cumulative():
    def kernel(a):
        result = like(a)
        nisa.tensor_scalar_cumulative(
            result, tile(a), nl.multiply, nl.add, 2.0, 5.0, reduce_cmd=nisa.reduce_cmd.load_reduce
        )
        return out(result)

    a = normal(6, 9)
    np.testing.assert_allclose(simulate(kernel, a), np.cumsum(a * 2, axis=1) + 5, rtol=1e-5, atol=1e-5)


def test_tensor_tensor_scan_is_a_linear_recurrence():
    def kernel(a, b):
        result = like(a)
        nisa.tensor_tensor_scan(result, tile(a), tile(b), 0.5, nl.multiply, nl.add)
        return out(result)

    a, b = normal(6, 9), normal(6, 9)
    state, golden = np.full(6, 0.5), np.empty_like(a)
    for i in range(9):
        state = a[:, i] * state + b[:, i]
        golden[:, i] = state
    np.testing.assert_allclose(simulate(kernel, a, b), golden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "function"), [("add", np.sum), ("average", np.mean), ("max", np.max)])
def test_tensor_partition_reduce(name, function):
    op = getattr(nl, name)

    def kernel(a):
        result = nl.ndarray((1, a.shape[1]), nl.float32)
        nisa.tensor_partition_reduce(result, op, tile(a))
        return out(result)

    a = normal(100, 9)
    np.testing.assert_allclose(simulate(kernel, a), function(a, axis=0, keepdims=True), rtol=1e-4, atol=1e-5)


def test_batch_statistics_of_two_parts():
    def kernel(a):
        stats, result = nl.ndarray((a.shape[0], 12), nl.float32), nl.ndarray((a.shape[0], 2), nl.float32)
        data = tile(a)
        nisa.bn_stats(stats[:, 0:6], data[:, 0:512])
        nisa.bn_stats(stats[:, 6:12], data[:, 512:700])
        nisa.bn_aggr(result, stats)
        return out(result)

    a = normal(20, 700)
    np.testing.assert_allclose(simulate(kernel, a), np.stack([a.mean(1), a.var(1)], 1), rtol=1e-4, atol=1e-5)


MATMULS = [(1, 1, 1), (33, 65, 7), (128, 128, 512)]


@pytest.mark.parametrize("sizes", MATMULS)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2])
def test_nc_matmul_accumulates_in_float32(sizes, dtype):
    def kernel(a, b):
        product, result = nl.ndarray((a.shape[1], b.shape[1]), nl.float32, nl.psum), nl.ndarray((a.shape[1], b.shape[1]), nl.float32)
        left, right = tile(a), tile(b)
        nisa.nc_matmul(product, left, right, accumulate=False)
        nisa.nc_matmul(product, left, right, accumulate=True)
        nisa.tensor_copy(result, product)
        return out(result)

    k, m, n = sizes
    a, b = normal(k, m).astype(dtype), normal(k, n).astype(dtype)
    golden = 2 * (a.astype(np.float64).T @ b.astype(np.float64))
    np.testing.assert_allclose(simulate(kernel, a, b), golden, rtol=1e-5, atol=1e-4)


def test_free_dimensions_of_a_matmul_are_flattened():
    def kernel(a, b):
        product, result = nl.ndarray((8, 2, 5), nl.float32, nl.psum), nl.ndarray((8, 2, 5), nl.float32)
        nisa.nc_matmul(product, tile(a), tile(b), accumulate=False)
        nisa.tensor_copy(result, product)
        return out(result)

    a, b = normal(16, 2, 4), normal(16, 2, 5)
    golden = (a.reshape(16, 8).T @ b.reshape(16, 10)).reshape(8, 2, 5)
    np.testing.assert_allclose(simulate(kernel, a, b), golden, rtol=1e-5, atol=1e-5)


def test_double_row_contracts_256():
    def kernel(a, b):
        product, result = nl.ndarray((16, 40), nl.float32, nl.psum), nl.ndarray((16, 40), nl.float32)
        mode = nisa.matmul_perf_mode.double_row
        nisa.nc_matmul(product, tile(a), tile(b), accumulate=False, perf_mode=mode)
        nisa.tensor_copy(result, product)
        return out(result)

    a, b = (normal(128, 2, n).astype(ml_dtypes.float8_e4m3) for n in (16, 40))
    golden = np.einsum("ktm,ktn->mn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(simulate(kernel, a, b), golden, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int32])
def test_transposes_keep_bits(dtype):
    def kernel(a):
        turned, result, small = nl.ndarray((20, 100), a.dtype, nl.psum), nl.ndarray((20, 100), a.dtype), nl.ndarray((20, 30), a.dtype)
        data = tile(a)
        nisa.nc_transpose(turned, data)
        nisa.tensor_copy(result, turned)
        nisa.nc_transpose(small, data[0:30])
        return out(result), out(small)

    a = RANDOM.integers(0, 256, (100, 20, np.dtype(dtype).itemsize)).astype(np.uint8).view(dtype).reshape(100, 20)
    whole, small = simulate(kernel, a)
    assert whole.tobytes() == a.T.tobytes() and small.tobytes() == a[:30].T.tobytes()


def test_transpose_by_matmul_keeps_nan():
    def kernel(a, eye):
        turned, result = nl.ndarray((9, 8), a.dtype, nl.psum), nl.ndarray((9, 8), a.dtype)
        nisa.nc_matmul(turned, tile(a), tile(eye), is_transpose=True)
        nisa.tensor_copy(result, turned)
        return out(result)

    a = normal(8, 9).astype(BF16)
    a[2, 3] = np.nan
    assert simulate(kernel, a, np.eye(8).astype(BF16)).tobytes() == a.T.tobytes()


def test_iota_and_affine_select():
    def kernel(a):
        numbers, masked = nl.ndarray((16, 3, 5), nl.int32), like(a)
        nisa.iota(numbers, [[7, 3], [-2, 5]], offset=100, channel_multiplier=10)
        nisa.affine_select(masked, [[-1, 24]], 1, tile(a), -9.0, nl.greater_equal, offset=2)
        return out(numbers), out(masked)

    a = normal(16, 24)
    numbers, masked = simulate(kernel, a)
    p, w, x = np.ogrid[:16, :3, :5]
    np.testing.assert_array_equal(numbers, 100 + 10 * p + 7 * w - 2 * x)
    np.testing.assert_array_equal(masked, np.where(2 + np.ogrid[:16, :24][0] - np.ogrid[:16, :24][1] >= 0, a, -9))


def test_range_select_with_maximum():
    def kernel(a, low, high):
        result, top = like(a), nl.ndarray((a.shape[0], 1), nl.float32)
        nisa.range_select(
            result, tile(a), nl.greater_equal, nl.less, tile(low), tile(high), reduce_res=top, range_start=4,
            on_false_value=-3.4028235e38,
        )  # fmt: skip
        return out(result), out(top)

    a, low, high = normal(10, 30), integers(10, 1, low=0, high=20).astype(np.float32), np.full((10, 1), 25, np.float32)
    index = 4 + np.arange(30)
    golden = np.where((index >= low) & (index < high), a, np.float32(-3.4028235e38))
    result, top = simulate(kernel, a, low, high)
    np.testing.assert_array_equal(result, golden)
    np.testing.assert_array_equal(top, golden.max(1, keepdims=True))


def test_selects_by_predicate():
    def kernel(a, b, mask):
        result, copied, top = like(a), tile(b), nl.ndarray((a.shape[0], 1), nl.float32)
        nisa.select_reduce(result, tile(mask), tile(a), -1.0, top, nisa.reduce_cmd.reset_reduce)
        nisa.tensor_copy_predicated(copied, tile(a), tile(mask), reverse_pred=True)
        return out(result), out(copied), out(top)

    a, b, mask = normal(10, 30), normal(10, 30), integers(10, 30, dtype=np.uint8, low=0, high=2)
    result, copied, top = simulate(kernel, a, b, mask)
    np.testing.assert_array_equal(result, np.where(mask, a, -1))
    np.testing.assert_array_equal(copied, np.where(mask, b, a))
    np.testing.assert_array_equal(top, np.where(mask, a, -1).max(1, keepdims=True))


def test_rounds_of_max8_sort_a_row():
    def kernel(a):
        rest, values, places = tile(a), nl.ndarray((5, 16), nl.float32), nl.ndarray((5, 16), nl.uint32)
        for i in range(2):
            eight = values[:, nl.ds(i * 8, 8)]
            nisa.max8(eight, rest)
            nisa.nc_find_index8(places[:, nl.ds(i * 8, 8)], rest, eight)
            nisa.nc_match_replace8(rest, rest, eight, -100.0)
        return out(values), out(places)

    a = normal(5, 40)
    values, places = simulate(kernel, a)
    np.testing.assert_array_equal(values, -np.sort(-a, axis=1)[:, :16])
    np.testing.assert_array_equal(places, np.argsort(-a, axis=1)[:, :16])


def test_equal_values_in_searches():
    def kernel(a, vals):
        found, replaced, places = nl.ndarray((1, 8), nl.uint32), like(a), nl.ndarray((1, 8), nl.uint32)
        nisa.nc_find_index8(found, tile(a), tile(vals))
        nisa.nc_match_replace8(replaced, tile(a), tile(vals), 0.0, places)
        return out(found), out(places)

    a = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    found, places = simulate(kernel, a, np.array([[3, 8, 8, 8, 8, 8, 8, 5]], np.float32))
    assert found.tolist() == [[2, 4, 5, 6, 7, 8, 9, 2**32 - 1]]
    assert places.tolist() == [[2, 9, 8, 7, 6, 5, 4, 2**32 - 1]]


def test_shuffle_within_quadrants():
    def kernel(a, b):
        mask, result = [1, 0, 255] + [i for i in range(3, 32)], tile(b)  # noqa: C416, RUF005
        nisa.nc_stream_shuffle(result, tile(a), mask)
        return out(result)

    a, b = normal(64, 4), normal(64, 4)
    golden = a[[1, 0, 2, *range(3, 32), 33, 32, *range(34, 64)]]
    golden[[2, 34]] = b[[2, 34]]
    np.testing.assert_array_equal(simulate(kernel, a, b), golden)


def test_gathers_within_partitions():
    def kernel(a, index, lists):
        result, local = nl.ndarray(index.shape, a.dtype), nl.ndarray((32, 64), a.dtype)
        nisa.nc_n_gather(result, tile(a), tile(index))
        nisa.local_gather(local, tile(a), tile(lists), num_elem_per_idx=2, num_valid_indices=32)
        return out(result), out(local)

    a, index = normal(32, 20), integers(32, 6, dtype=np.uint32, low=0, high=20)
    lists = integers(32, 2, dtype=np.uint16, low=0, high=19)
    result, local = simulate(kernel, a, index, lists)
    np.testing.assert_array_equal(result, np.take_along_axis(a, index.astype(int), axis=1))
    for core in range(2):
        rows = slice(core * 16, core * 16 + 16)
        places = lists[rows].flatten(order="F")[:, None].astype(int) + np.arange(2)
        np.testing.assert_array_equal(local[rows], a[rows][:, places.reshape(-1)])


def test_nonzero_with_count_touches_every_sixteenth_partition():
    def kernel(a, b):
        result = tile(b)
        nisa.nonzero_with_count(result, tile(a), index_offset=16)
        return out(result)

    a, b = np.tile([[0, 1, 1, 0, 0, 1, 0, 0]], (17, 1)).astype(np.float32), integers(17, 9)
    result = simulate(kernel, a, b)
    assert result[0].tolist() == result[16].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    np.testing.assert_array_equal(result[1:16], b[1:16])


def test_sequence_bounds():
    def kernel(a):
        result = nl.ndarray((1, 2, a.shape[1]), nl.int32)
        nisa.sequence_bounds(result, tile(a))
        return out(result)

    assert simulate(kernel, np.array([[1, 1, 2, 2, 2, 0]], np.int32)).tolist() == [
        [[0, 0, 2, 2, 2, 6], [2, 2, 5, 5, 5, -1]]
    ]


def test_dma_gathers_scatters_and_skips():
    def kernel(a, index):
        rows, gathered = tile(index), nl.zeros((8, 6), nl.float32)
        pattern = [[6, 8], [1, 6]]
        nisa.dma_copy(gathered, a.ap(pattern, vector_offset=rows), oob_mode=nisa.oob_mode.skip)
        result = nl.zeros((20, 6), nl.float32, nl.shared_hbm)
        nisa.dma_copy(result.ap(pattern, vector_offset=rows), gathered, oob_mode=nisa.oob_mode.skip)
        return out(gathered), result

    a, index = normal(20, 6), np.array([[3], [-1], [19], [20], [0], [7], [8], [11]], np.int32)
    gathered, result = simulate(kernel, a, index)
    valid = [0, 2, 4, 5, 6, 7]
    golden = np.zeros((8, 6), np.float32)
    golden[valid] = a[index[valid, 0]]
    np.testing.assert_array_equal(gathered, golden)
    scattered = np.zeros((20, 6), np.float32)
    scattered[index[valid, 0]] = golden[valid]
    np.testing.assert_array_equal(result, scattered)


@pytest.mark.parametrize(("shape", "axes"), [((16, 9), (1, 0)), ((4, 3, 9), (2, 1, 0)), ((4, 3, 2, 9), (3, 1, 2, 0))])
def test_dma_transpose(shape, axes):
    wanted = tuple(shape[a] for a in axes)

    def kernel(a):
        result = nl.ndarray(wanted, a.dtype)
        nisa.dma_transpose(result, a, axes=axes)
        return out(result)

    a = normal(*shape).astype(BF16)
    assert simulate(kernel, a).tobytes() == np.transpose(a, axes).tobytes()


def test_dma_transpose_gathers_column_after_column():
    def kernel(a, index):
        result = nl.ndarray((9, 256), a.dtype)
        nisa.dma_transpose(result, a.ap([[9, 256], [1, 9]], vector_offset=tile(index)))
        return out(result)

    a, index = normal(40, 9).astype(BF16), integers(128, 2, dtype=np.uint32, low=0, high=40)
    assert simulate(kernel, a, index).tobytes() == a[index.T.flatten()].T.tobytes()


def test_dma_compute_adds_into_rows():
    def kernel(a, b, index):
        result = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
        nisa.dma_compute(result, [a, a], nl.add)
        rows = result.ap([[6, 4], [1, 6]], vector_offset=tile(index))
        nisa.dma_compute(rows, [rows, tile(b)], nl.add)
        return result

    a, b, index = normal(20, 6), normal(4, 6), np.array([[3], [9], [0], [7]], np.int32)
    golden = a * 2
    golden[index[:, 0]] += b
    np.testing.assert_array_equal(simulate(kernel, a, b, index), golden)


def test_registers_and_device_loops():
    def kernel(a, count):
        bound, total = nisa.register_alloc(), nl.zeros((1, 6), nl.float32)
        nisa.register_load(bound, tile(count))

        def add_row(i):
            row = nl.ndarray((1, 6), nl.float32)
            nisa.dma_copy(row, a.ap([[6, 1], [1, 6]], scalar_offset=i, indirect_dim=0))
            nisa.tensor_tensor(total, total, row, nl.add)

        nl.fori_loop(1, bound, add_row, step=2)
        left = nl.ndarray((1, 1), nl.int32)
        nisa.register_store(left, bound)
        return out(total), out(left)

    a = normal(20, 6)
    total, left = simulate(kernel, a, np.array([[8]], np.int32))
    np.testing.assert_allclose(total[0], a[1:8:2].sum(0), rtol=1e-5)
    assert left.item() == 8


def test_two_cores_exchange_and_meet():
    def kernel(a):
        rank = nl.program_id(0)
        result = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
        mine, other = tile(a[rank]), nl.ndarray(a.shape[1:], a.dtype)
        nisa.sendrecv(mine, other, 1 - rank, 1 - rank, 0)
        nisa.dma_copy(result[rank], other)
        nisa.core_barrier(result, (0, 1))
        return result

    a = normal(2, 16, 5)
    np.testing.assert_array_equal(nki.simulate(kernel)[2](a), a[::-1])


def test_random_numbers_and_dropout():
    def kernel(a, seed):
        nisa.set_rng_seed(tile(seed))
        bits, kept = nl.ndarray((8, 100), nl.uint32), like(a)
        nisa.rng(bits)
        nisa.dropout(kept, tile(a), 0.25)
        return out(bits), out(kept)

    a = np.ones((128, 100), np.float32)
    bits, kept = simulate(kernel, a, np.array([[3]], np.uint32))
    assert len(np.unique(bits)) > 700 and 0.7 < kept.mean() < 0.8


def test_in_place_operations_read_before_they_write():
    def kernel(a):
        data = tile(a)
        nisa.tensor_tensor(data[:, 1:8], data[:, 0:7], data[:, 1:8], nl.add)
        return out(data)

    a = normal(4, 8)
    golden = a.copy()
    golden[:, 1:] = a[:, :7] + a[:, 1:]
    np.testing.assert_array_equal(simulate(kernel, a), golden)


def test_imprecise_mode_keeps_float32():
    def kernel(a):
        rounded = nl.ndarray(a.shape, nl.bfloat16)
        nisa.tensor_copy(rounded, tile(a))
        result = like(a)
        nisa.tensor_copy(result, rounded)
        return out(result)

    a = normal(4, 8)
    np.testing.assert_array_equal(simulate(kernel, a), a.astype(BF16).astype(np.float32))
    np.testing.assert_array_equal(simulate(kernel, a, precise=False), a)


def test_microscaling_product_is_that_of_the_quantised_values():
    def kernel(a, b):
        product, result = nl.ndarray((6, 10), nl.float32, nl.psum), nl.ndarray((6, 10), nl.float32)
        quantised = []
        for source, columns in ((a, 6), (b, 10)):
            packed, scales = nl.ndarray((64, columns), nl.float8_e4m3fn_x4), nl.ndarray((64, columns), nl.float8_e8m0fnu)
            nisa.quantize_mx(packed, tile(source), scales)
            quantised.append((packed, scales))
        (left, left_scale), (right, right_scale) = quantised
        nisa.nc_matmul_mx(product, left, right, left_scale, right_scale, accumulate=False)
        nisa.tensor_copy(result, product)
        return out(result)

    def golden(x):
        groups = x.astype(np.float64).reshape(8, 8, -1, 4)
        scale = np.exp2(np.floor(np.log2(np.abs(groups).max((1, 3), keepdims=True))) - 7)
        return ((groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(64, -1, 4)

    a, b = normal(64, 24).astype(BF16), normal(64, 40).astype(BF16)
    product = np.einsum("kmi,kni->mn", golden(a), golden(b))
    np.testing.assert_allclose(simulate(kernel, a, b, target="trn3"), product, rtol=1e-5, atol=1e-4)


def test_activations_of_trn3():
    def kernel(a, top):
        powers, total, result = like(a), nl.ndarray((a.shape[0], 1), nl.float32), like(a)
        nisa.exponential(powers, tile(a), tile(top), total, nisa.reduce_cmd.reset_reduce)
        nisa.activate2(result, nl.relu, tile(a), 2.0, 0.5, nl.multiply, nl.subtract, reverse1=True)
        return out(powers), out(total), out(result)

    a, top = normal(9, 11), normal(9, 1)
    powers, total, result = simulate(kernel, a, top, target="trn3")
    np.testing.assert_allclose(powers, np.exp(a - top), rtol=1e-5)
    np.testing.assert_allclose(total, np.exp(a - top).sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(result, np.maximum(0.5 - a * 2, 0), rtol=1e-5)
