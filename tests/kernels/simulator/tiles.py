"""What the tests of instructions are written with."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

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
