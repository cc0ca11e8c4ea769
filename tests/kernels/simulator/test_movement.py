"""Selections, searches, gathers, DMA, registers and cores against NumPy, from the formulas of their documentation."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from .tiles import integers, like, normal, out, simulate, tile

BF16 = ml_dtypes.bfloat16


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
        mask, result = [1, 0, 255] + [i for i in range(3, 32)], tile(b)  # noqa: C416
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
