"""Element-wise instructions, reductions and activations against NumPy, from the formulas of their documentation."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from scipy import special

from .tiles import RANDOM, integers, like, normal, out, simulate, tile

BF16 = ml_dtypes.bfloat16
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


def test_tfloat32_keeps_ten_bits_of_mantissa():
    def kernel(a):
        result = like(a, nl.tfloat32)
        nisa.tensor_copy(result, tile(a))
        return out(result.view(nl.float32))

    a = np.array([[1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-10, np.inf, np.nan]], np.float32)
    np.testing.assert_array_equal(simulate(kernel, a), [[1, 1 + 2**-9, 1 + 2**-10, np.inf, np.nan]])


ACTIVATIONS = {
    "copy": lambda x: x, "square": np.square, "exp": np.exp, "tanh": np.tanh, "erf": special.erf, "sign": np.sign,
    "sigmoid": special.expit, "relu": lambda x: np.maximum(x, 0), "silu": lambda x: x * special.expit(x),
    "gelu": lambda x: x * special.ndtr(x), "softplus": lambda x: np.log1p(np.exp(x)), "abs": np.abs,
    "arctan": np.arctan,
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
        nisa.activation(scratch, nl.exp, tile(b), reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce)
        return out(total)

    a, b = normal(9, 11), normal(9, 11)
    golden = np.exp(a).sum(1, keepdims=True) + np.exp(b).sum(1, keepdims=True)
    np.testing.assert_allclose(simulate(kernel, a, b), golden, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "function"), [("add", np.sum), ("multiply", np.prod), ("maximum", np.max), ("minimum", np.min)]
)
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
