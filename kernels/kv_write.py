"""NKI kernel of `kv_write`.

Roofline: HBM traffic, the rows once in and once out; 6 us for 2048 tokens of one head of 128 in bfloat16 at 362 GB/s.
The estimate is higher: a slot is known at run time only, so the GpSimd Engine generates the descriptors of both caches,
600 ns for every 128 tokens and cache (19 us for 2048 tokens). Nobody waits for a cache but the attention after it.

The caches are updated in place, which is what the twin's functional form becomes on a device.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.tiling import PARTITIONS, dtype_of, require, require_array, require_cores, share

ROW_BYTES = 32768
"""Of the heads of a token at most: a row of each cache is in a partition of SBUF, twice to overlap."""


def kv_write(k_cache: Any, v_cache: Any, k: Any, v: Any, slots: Any, lnc: int = 1) -> tuple[Any, Any]:
    """The caches [NB, BS, K, D] themselves, with rows k and v [T, K, D] written at `slots` [T] (int32).

    Slot s is row s of the [NB * BS, K, D] view. Rows that share a slot: which of them wins is undefined.

    Args:
        k_cache, v_cache: float32 or bfloat16; written in place.
        k, v: of the caches' type.
        slots: 0 to NB * BS - 1; others are an error at run time.
        lnc: cores, which share the rows.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    check_kv_write(k_cache, v_cache, k, v, slots, lnc)
    written_k, written_v = kv_write_kernel[lnc](k_cache, v_cache, k, v, slots)
    return written_k, written_v


def check_kv_write(k_cache: Any, v_cache: Any, k: Any, v: Any, slots: Any, lnc: int = 1) -> None:
    """Raises ValueError if kv_write does not take these arguments."""
    require_cores(lnc)
    require_array("k_cache", k_cache, ("NB", "BS", "K", "D"))
    require_array("v_cache", v_cache, tuple(k_cache.shape), (dtype_of(k_cache),))
    require_array("k", k, ("T", *k_cache.shape[2:]), (dtype_of(k_cache),))
    require_array("v", v, tuple(k.shape), (dtype_of(k_cache),))
    require_array("slots", slots, (k.shape[0],), ("int32",))
    size = k.shape[1] * k.shape[2] * (4 if dtype_of(k) == "float32" else 2)
    require(size <= ROW_BYTES, "k", f"must have up to {ROW_BYTES} bytes a token", f"{size} bytes")


@nki.jit
def kv_write_kernel(k_cache, v_cache, k, v, slots):
    """kv_write in place."""
    first, count = share(k.shape[0])
    for start in nl.affine_range((count + PARTITIONS - 1) // PARTITIONS):
        token = first + start * PARTITIONS
        tokens = min(PARTITIONS, first + count - token)
        index = nl.ndarray((tokens, 1), slots.dtype)
        nisa.dma_copy(dst=index, src=slots[nl.ds(token, tokens)])
        _scatter(k, k_cache, index, token)
        _scatter(v, v_cache, index, token)
    return k_cache, v_cache


def _scatter(rows, cache, index, token):
    """Rows from `token` on to the places of a cache that `index` [T', 1] names."""
    tokens, width = index.shape[0], rows.shape[1] * rows.shape[2]
    tile = nl.ndarray((tokens, width), rows.dtype)
    nisa.dma_copy(dst=tile, src=rows[nl.ds(token, tokens)])
    places = cache.reshape((cache.shape[0] * cache.shape[1], width))
    nisa.dma_copy(dst=places.ap(pattern=[[width, tokens], [1, width]], vector_offset=index), src=tile)
