"""Matrix products, transposes and microscaling against NumPy, from the formulas of their documentation."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from .tiles import RANDOM, like, normal, out, simulate, tile

BF16 = ml_dtypes.bfloat16
MATMULS = [(1, 1, 1), (33, 65, 7), (128, 128, 512)]


@pytest.mark.parametrize("sizes", MATMULS)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2])
def test_nc_matmul_accumulates_in_float32(sizes, dtype):
    def kernel(a, b):
        product, result = (
            nl.ndarray((a.shape[1], b.shape[1]), nl.float32, nl.psum),
            nl.ndarray((a.shape[1], b.shape[1]), nl.float32),
        )
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
        turned, result, small = (
            nl.ndarray((20, 100), a.dtype, nl.psum),
            nl.ndarray((20, 100), a.dtype),
            nl.ndarray((20, 30), a.dtype),
        )
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


def test_microscaling_product_is_that_of_the_quantised_values():
    def kernel(a, b):
        product, result = nl.ndarray((6, 10), nl.float32, nl.psum), nl.ndarray((6, 10), nl.float32)
        quantised = []
        for source, columns in ((a, 6), (b, 10)):
            packed, scales = (
                nl.ndarray((64, columns), nl.float8_e4m3fn_x4),
                nl.ndarray((64, columns), nl.float8_e8m0fnu),
            )
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
