"""NKI kernel of `top_k` and `argmax` over the vocabulary.

Roofline: HBM traffic, the logits once (0.2 us for 1 x 16384 in float32 at 362 GB/s, 2.9 us for 16 rows). In fact it is
the Vector Engine that bounds: it finds eight values in a pass over what a partition holds, in three passes with their
indices and without the ones it found.

So a row is cut into pieces, a piece per partition. Each piece gives its best k, rounded up to 8; those of a row are
brought into one partition, where the same search goes over them. Few pieces make the first search long, many the
second: the cut is the one with the least work (rounds * 3 * (V / pieces + pieces * 8 * rounds) cycles per 128
partitions of pieces). Any piece may hold all of the k largest, so that fewer than k of each would be wrong.

Equal values: a piece lists them by index, and the pieces lie by index, so that the search of the second step, which
takes the first of equal ones, keeps the order.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.tiling import PARTITIONS, require, require_array, require_cores, share

EIGHT = 8
"""Values that an instruction finds."""
SEARCH = 16384
"""Elements per partition that it searches at most."""
CANDIDATES = 8192
"""Elements per partition of the second search at most, so that they fit into SBUF beside their indices."""
LARGEST_K = 256
TAKEN = float("-inf")
"""What a value that was found is replaced by."""


def top_k(logits: Any, k: int, lnc: int = 1) -> tuple[Any, Any]:
    """The k largest of each row of logits [T, V], descending, of equal ones the lower index first.

    Args:
        logits: float32 or bfloat16, without NaN. Entries that are -inf are returned as -inf, with any index.
        k: 1 to 256.
        lnc: cores, which share the rows.

    Returns:
        Values [T, k] in the type of logits, and indices [T, k] (int32).

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    check_top_k(logits, k, lnc)
    values, indices = top_k_kernel[lnc](logits, k)
    return values, indices


def check_top_k(logits: Any, k: int, lnc: int = 1) -> None:
    """Raises ValueError if top_k does not take these arguments."""
    require_cores(lnc)
    require_array("logits", logits, ("T", "V"))
    rows, vocabulary = logits.shape
    require(1 <= k <= min(LARGEST_K, vocabulary), "k", f"must be 1 to {min(LARGEST_K, vocabulary)}", k)
    rule = (
        f"must have a vocabulary of pieces of {rounds_of(k) * EIGHT} to {SEARCH} elements, up to {PARTITIONS} of them"
    )
    require(cut(rows, vocabulary, k) > 0, "logits", rule, vocabulary)


def argmax(logits: Any, lnc: int = 1) -> Any:
    """Index of the largest of each row of logits [T, V], of equal ones the lowest: [T] (int32).

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    return top_k(logits, 1, lnc)[1].reshape(-1)


def check_argmax(logits: Any, lnc: int = 1) -> None:
    """Raises ValueError if argmax does not take these arguments."""
    check_top_k(logits, 1, lnc)


def rounds_of(k):
    """Searches that find k values."""
    return (k + EIGHT - 1) // EIGHT


def cut(rows, vocabulary, k):
    """Pieces of a row that make for the least work; 0 if there is no way to cut it."""
    found = rounds_of(k) * EIGHT
    best, least = 0, 0
    for pieces in range(1, PARTITIONS + 1):
        size = vocabulary // pieces
        fits = size * pieces == vocabulary and found <= size and size <= SEARCH and pieces * found <= CANDIDATES
        if fits:
            together = PARTITIONS // pieces
            work = (rows + together - 1) // together * (size + (pieces * found if pieces > 1 else 0))
            if best == 0 or work < least:
                best, least = pieces, work
    return best


@nki.jit
def top_k_kernel(logits, k):
    """top_k of logits [T, V]."""
    rows, vocabulary = logits.shape
    values = nl.ndarray((rows, k), logits.dtype, buffer=nl.shared_hbm)
    indices = nl.ndarray((rows, k), nl.int32, buffer=nl.shared_hbm)
    pieces = cut(rows, vocabulary, k)
    together = PARTITIONS // pieces
    first, count = share(rows)
    for number in nl.affine_range((count + together - 1) // together):
        row = first + number * together
        _rows(logits, k, values, indices, row, min(together, first + count - row), pieces)
    return values, indices


def _rows(logits, k, values, indices, row, rows, pieces):
    """Rows that are searched at the same time, all their pieces side by side."""
    vocabulary = logits.shape[1]
    size = vocabulary // pieces
    found = rounds_of(k) * EIGHT
    tile = nl.ndarray((rows * pieces, size), logits.dtype)
    nisa.dma_copy(dst=tile, src=logits.ap(pattern=[[size, rows * pieces], [1, size]], offset=row * vocabulary))
    best, places = _search(tile, found)
    best, places = _second(best, places, rows, pieces, size) if pieces > 1 else (best, places)
    nisa.dma_copy(dst=values[nl.ds(row, rows)], src=best[:, 0:k])
    nisa.dma_copy(dst=indices[nl.ds(row, rows)], src=places[:, 0:k])


def _search(tile, found):
    """The largest `found` values of each partition, descending, and their places; `tile` loses them."""
    lanes = tile.shape[0]
    best = nl.ndarray((lanes, found), tile.dtype)
    places = nl.ndarray((lanes, found), nl.uint32)
    for number in nl.affine_range(found // EIGHT):
        eight = nl.ds(number * EIGHT, EIGHT)
        nisa.max8(dst=best[:, eight], src=tile)
        nisa.nc_find_index8(dst=places[:, eight], data=tile, vals=best[:, eight])
        if number + 1 < found // EIGHT:
            nisa.nc_match_replace8(dst=tile, data=tile, vals=best[:, eight], imm=TAKEN)
    return best, places


def _second(best, places, rows, pieces, size):
    """The largest of what all pieces of a row found, and their indices in the row."""
    lanes, found = best.shape
    # Integers stay exact: the GpSimd Engine adds those of 32 bits as integers.
    starts = nl.ndarray((lanes, found), nl.uint32)
    nisa.iota(dst=starts, pattern=[[0, found]], channel_multiplier=size)
    whole = nl.ndarray((lanes, found), nl.uint32)
    nisa.tensor_tensor(dst=whole, data1=places, data2=starts, op=nl.add)

    candidates = nl.ndarray((rows, pieces * found), best.dtype)
    nisa.dma_copy(dst=candidates, src=best)
    origins = nl.ndarray((rows, pieces * found), nl.uint32)
    nisa.dma_copy(dst=origins, src=whole)
    best, places = _search(candidates, found)
    picked = nl.ndarray((rows, found), nl.uint32)
    nisa.nc_n_gather(dst=picked, data=origins, indices=places)
    row_starts = nl.ndarray((rows, found), nl.int32)
    nisa.iota(dst=row_starts, pattern=[[0, found]], channel_multiplier=-pieces * size)
    indices = nl.ndarray((rows, found), nl.int32)
    nisa.tensor_tensor(dst=indices, data1=picked, data2=row_starts, op=nl.add)
    return best, indices
