"""NKI kernel of `rope`.

Roofline: HBM traffic, q and k once in each direction and the tables; 17 us for 2048 tokens of 4 + 1 heads of 128 in
bfloat16 at 362 GB/s. The arithmetic takes more: two products and a sum for every element. They are shared out so that
no engine has much more than 2 (N + K) D cycles per 128 tokens:

- the Vector Engine multiplies by cosines and adds; an operand in PSUM saves it the second pass over the port of SBUF;
- the GpSimd Engine multiplies by sines, reading the halves of the head crosswise, so that nothing is ever moved.

The DMA takes longer than the roofline, since a row of the tables or of one KV head is 256 bytes, an eighth of what
descriptors want. Few tokens have a head per partition instead of a token, which keeps decode at the latency of its two
transfers.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.tiling import PARTITIONS, dtype_of, require, require_array, require_cores, share

HEADS_BYTES = 32768
"""Of the heads of a token in float32 at most: four times that is in a partition of SBUF at the same time."""
HEAD_DIM = 1024
"""Elements of a head at most: its cosines take one bank of PSUM."""
GROUP = 1024
"""Elements of the heads that are rotated at once: two banks of PSUM, so that two groups and their tables have room."""


def rope(q: Any, k: Any, cos: Any, sin: Any, lnc: int = 1) -> tuple[Any, Any]:
    """Rotate q [T, N, D] and k [T, K, D] by `cos` and `sin` [T, D/2], float32; dimension i pairs with i + D/2.

    Args:
        q, k: float32 or bfloat16, both of one type.
        cos, sin: tables of `rope_tables`.
        lnc: cores, which share the tokens.

    Raises:
        ValueError: an argument breaks a rule of the kernel.
    """
    check_rope(q, k, cos, sin, lnc)
    rotated_q, rotated_k = rope_kernel[lnc](q, k, cos, sin)
    return rotated_q, rotated_k


def check_rope(q: Any, k: Any, cos: Any, sin: Any, lnc: int = 1) -> None:
    """Raises ValueError if rope does not take these arguments."""
    require_cores(lnc)
    require_array("q", q, ("T", "N", "D"))
    tokens, heads, dim = q.shape
    require_array("k", k, (tokens, "K", dim), (dtype_of(q),))
    require(dim % 2 == 0 and dim <= HEAD_DIM, "q", f"must have an even head size of up to {HEAD_DIM}", dim)
    size = (heads + k.shape[1]) * dim * 4
    require(size <= HEADS_BYTES, "q", f"must have, with k, up to {HEADS_BYTES // 4} elements a token", size // 4)
    for name, table in (("cos", cos), ("sin", sin)):
        require_array(name, table, (tokens, dim // 2), ("float32",))


@nki.jit
def rope_kernel(q, k, cos, sin):
    """rope of q [T, N, D] and k [T, K, D]."""
    rotated_q = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm)
    rotated_k = nl.ndarray(k.shape, k.dtype, buffer=nl.shared_hbm)
    heads = q.shape[1] + k.shape[1]
    first, count = share(q.shape[0])
    if count > 0 and count * heads <= PARTITIONS:
        _head_per_partition(q, k, cos, sin, rotated_q, rotated_k, first, count)
        return rotated_q, rotated_k
    for start in nl.affine_range((count + PARTITIONS - 1) // PARTITIONS):
        token = first + start * PARTITIONS
        _token_per_partition(q, k, cos, sin, rotated_q, rotated_k, token, min(PARTITIONS, first + count - token))
    return rotated_q, rotated_k


def _token_per_partition(q, k, cos, sin, rotated_q, rotated_k, token, tokens):
    n, dim = q.shape[1], q.shape[2]
    kv = k.shape[1]
    tile = nl.ndarray((tokens, n + kv, dim), q.dtype)
    nisa.dma_copy(dst=tile[:, 0:n], src=q[nl.ds(token, tokens)])
    nisa.dma_copy(dst=tile[:, n : n + kv], src=k[nl.ds(token, tokens)])
    cosines = nl.ndarray((tokens, dim // 2), nl.float32)
    sines = nl.ndarray((tokens, dim // 2), nl.float32)
    nisa.dma_copy(dst=cosines, src=cos[nl.ds(token, tokens)])
    nisa.dma_copy(dst=sines, src=sin[nl.ds(token, tokens)])
    out = _rotated(tile, cosines, sines)
    nisa.dma_copy(dst=rotated_q[nl.ds(token, tokens)], src=out[:, 0:n])
    nisa.dma_copy(dst=rotated_k[nl.ds(token, tokens)], src=out[:, n : n + kv])


def _head_per_partition(q, k, cos, sin, rotated_q, rotated_k, first, count):
    n, dim = q.shape[1], q.shape[2]
    kv = k.shape[1]
    half = dim // 2
    rows = count * (n + kv)
    split = count * n
    tile = nl.ndarray((rows, 1, dim), q.dtype)
    cosines = nl.ndarray((rows, half), nl.float32)
    sines = nl.ndarray((rows, half), nl.float32)
    nisa.dma_copy(dst=tile[0:split], src=q[nl.ds(first, count)])
    nisa.dma_copy(dst=tile[split:rows], src=k[nl.ds(first, count)])
    # A token's row of the tables goes to each of its heads: a step of 0 over the heads.
    of_q = [[half, count], [0, n], [1, half]]
    of_k = [[half, count], [0, kv], [1, half]]
    nisa.dma_copy(dst=cosines[0:split], src=cos.ap(pattern=of_q, offset=first * half))
    nisa.dma_copy(dst=cosines[split:rows], src=cos.ap(pattern=of_k, offset=first * half))
    nisa.dma_copy(dst=sines[0:split], src=sin.ap(pattern=of_q, offset=first * half))
    nisa.dma_copy(dst=sines[split:rows], src=sin.ap(pattern=of_k, offset=first * half))
    out = _rotated(tile, cosines, sines)
    nisa.dma_copy(dst=rotated_q[nl.ds(first, count)], src=out[0:split])
    nisa.dma_copy(dst=rotated_k[nl.ds(first, count)], src=out[split:rows])


def _rotated(tile, cosines, sines):
    """Heads tile [P, heads, D] rotated by cosines and sines [P, D/2]."""
    rows, heads, dim = tile.shape
    half = dim // 2
    near = nl.ndarray((rows, half), nl.float32, buffer=nl.psum)
    nisa.tensor_copy(dst=near, src=cosines, engine=nisa.engine.scalar)
    out = nl.ndarray((rows, heads, 2, half), tile.dtype)
    halves = tile.reshape((rows, heads, 2, half))
    group = max(1, GROUP // dim)
    for number in nl.affine_range((heads + group - 1) // group):
        few = min(group, heads - number * group)
        source = halves[:, nl.ds(number * group, few)]
        target = out[:, nl.ds(number * group, few)]
        direct = nl.ndarray((rows, few, 2, half), nl.float32, buffer=nl.psum)
        crossed = nl.ndarray((rows, few, 2, half), nl.float32)
        nisa.tensor_tensor(
            dst=direct, data1=source, data2=near.ap(pattern=[[half, rows], [0, 2 * few], [1, half]]), op=nl.multiply
        )
        for part in nl.static_range(2):
            nisa.tensor_tensor(
                dst=crossed[:, :, part],
                data1=source[:, :, 1 - part],
                data2=sines.ap(pattern=[[half, rows], [0, few], [1, half]]),
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )
        nisa.tensor_tensor(dst=target[:, :, 0], data1=direct[:, :, 0], data2=crossed[:, :, 0], op=nl.subtract)
        nisa.tensor_tensor(dst=target[:, :, 1], data1=direct[:, :, 1], data2=crossed[:, :, 1], op=nl.add)
    return out.reshape((rows, heads, dim))
