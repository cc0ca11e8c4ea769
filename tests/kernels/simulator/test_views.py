"""Views and access patterns against NumPy, over drawn shapes."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from .tiles import normal, out, simulate, tile

quick = settings(max_examples=30, deadline=None)
sizes = st.integers(1, 6)


@quick
@given(st.data())
def test_access_patterns_are_sums_of_strides(data):
    counts = data.draw(st.lists(sizes, min_size=1, max_size=3))
    strides = data.draw(st.lists(st.integers(0, 7), min_size=len(counts), max_size=len(counts)))
    offset = data.draw(st.integers(0, 20))
    reach = offset + sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + 1
    pattern = tuple(zip([reach, *strides], [3, *counts], strict=True))

    def kernel(a):
        taken = nl.ndarray((3, *counts) if len(counts) > 1 else (3, counts[0]), a.dtype)
        nisa.tensor_copy(taken, tile(a).ap([[s, n] for s, n in pattern], offset=offset))
        return out(taken)

    a = normal(3, reach)
    golden = as_strided(a[:, offset:], (3, *counts), (a.strides[0], *(4 * s for s in strides)))
    np.testing.assert_array_equal(nki.simulate(kernel, strict=False)(a).reshape(golden.shape), golden)


@quick
@given(st.data())
def test_chains_of_views(data):
    shape = (4, *data.draw(st.lists(sizes, min_size=2, max_size=3)))
    a = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    steps, golden = [], a
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["slice", "select", "permute", "expand", "split"]))
        dim = data.draw(st.integers(1, golden.ndim - 1))
        size = golden.shape[dim]
        if kind == "slice":
            start = data.draw(st.integers(0, size - 1))
            stop, step = data.draw(st.integers(start + 1, size)), data.draw(st.integers(1, 3))
            steps.append(("slice", (dim, start, stop, step)))
            golden = golden[(slice(None),) * dim + (slice(start, stop, step),)]
        elif kind == "select" and golden.ndim > 2:
            index = data.draw(st.integers(0, size - 1))
            steps.append(("select", (dim, index)))
            golden = np.take(golden, index, axis=dim)
        elif kind == "permute":
            order = (0, *data.draw(st.permutations(range(1, golden.ndim))))
            steps.append(("permute", (order,)))
            golden = golden.transpose(order)
        elif kind == "expand" and golden.ndim < 5:
            steps.append(("expand_dim", (dim,)))
            golden = np.expand_dims(golden, dim)
        elif kind == "split" and size % 2 == 0 and golden.ndim < 5:
            steps.append(("reshape_dim", (dim, (2, -1))))
            golden = golden.reshape(*golden.shape[:dim], 2, size // 2, *golden.shape[dim + 1 :])

    def kernel(a):
        view = tile(a)
        for name, arguments in steps:
            view = getattr(view, name)(*arguments)
        copied = nl.ndarray(view.shape, view.dtype)
        nisa.tensor_copy(copied, view)
        return out(copied)

    np.testing.assert_array_equal(nki.simulate(kernel, strict=False)(a), golden)


@quick
@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_scatter_undoes_gather(rows, columns, seed):
    def kernel(a, index):
        places, moved = tile(index), nl.ndarray(a.shape, a.dtype)
        result = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
        pattern = [[columns, rows], [1, columns]]
        nisa.dma_copy(moved, a.ap(pattern, vector_offset=places))
        nisa.dma_copy(result.ap(pattern, vector_offset=places), moved)
        return result

    a = normal(rows, columns)
    index = np.random.default_rng(seed).permutation(rows).astype(np.int32).reshape(rows, 1)
    np.testing.assert_array_equal(simulate(kernel, a, index), a)


def test_indexing_keeps_two_dimensions_on_chip_and_one_in_hbm():
    shapes = []

    def kernel(a):
        chip = tile(a)
        shapes.extend(t.shape for t in (chip[0], chip[:, 1], chip[0, 1, 2], chip[..., 0], chip[:, 1:3, nl.ds(0, 2)]))
        shapes.extend(t.shape for t in (a[0], a[:, 1], a[0, 1, 2], a[..., 0], a[-1, 0:2]))

    nki.simulate(kernel, strict=False)(normal(4, 3, 5))
    assert shapes == [(1, 3, 5), (4, 5), (1, 1), (4, 3), (4, 2, 2), (3, 5), (4, 5), (1,), (4, 3), (2, 5)]


def test_views_of_another_type():
    def kernel(a):
        chip = tile(a)
        nisa.tensor_scalar(chip.view(nl.int32), chip.view(nl.int32), nl.bitwise_and, 0x7FFFFFFF)
        return out(chip)

    a = normal(4, 8)
    np.testing.assert_array_equal(simulate(kernel, a), np.abs(a))


def test_kernels_update_their_inputs_in_place():
    def kernel(a, strided):
        nisa.dma_copy(a[0:1], tile(a[1:2]))
        nisa.dma_copy(strided[0:1], tile(strided[1:2]))

    a, strided = normal(2, 4), normal(4, 2).T
    rows, columns = a[1].copy(), strided[1].copy()
    simulate(kernel, a, strided)
    np.testing.assert_array_equal(a[0], rows)
    np.testing.assert_array_equal(strided[0], columns)
