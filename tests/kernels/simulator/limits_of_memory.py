"""Kernels that break one documented limit each: of DMA, of the memories, of the language."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from .limits import CASES, breaks, filled, hbm, sb

# DMA.


@breaks("dma_copy", "src is in psum: a DMA accesses sbuf or hbm")
def dma_from_psum():
    nisa.dma_copy(hbm((8, 4)), filled((8, 4)))


@breaks("dma_copy", "src has 32 elements, dst 16: they must be equal")
def dma_of_other_size():
    nisa.dma_copy(sb((4, 4)), hbm((8, 4)))


@breaks("dma_copy", "hwdge from float32 to bfloat16: it cannot cast")
def hardware_dma_with_cast():
    nisa.dma_copy(sb((8, 4), "bfloat16"), hbm((8, 4)), dge_mode=nisa.dge_mode.hwdge)


@breaks("dma_copy", "hwdge with vector_offset: only swdge gathers and scatters")
def hardware_dma_with_gather():
    rows = hbm((8, 4)).ap([[4, 8], [1, 4]], vector_offset=nl.zeros((8, 1), "int32"))
    nisa.dma_copy(sb((8, 4)), rows, dge_mode=nisa.dge_mode.hwdge)


@breaks("kernel", "only tensors in hbm can be indexed by a vector")
def gather_from_sbuf():
    sb((8, 4)).ap([[4, 8], [1, 4]], vector_offset=nl.zeros((8, 1), "int32"))


@breaks("dma_copy", "src has index 9 of 8 rows (oob_mode.error)")
def gather_out_of_bounds():
    nisa.dma_copy(sb((2, 4)), hbm((8, 4)).ap([[4, 2], [1, 4]], vector_offset=nl.full((2, 1), 9, "int32")))


@breaks("dma_copy", "src has a dynamic index 8 of 8 (oob_mode.error)")
def dynamic_index_out_of_bounds():
    nisa.dma_copy(sb((1, 4)), hbm((8, 4)).select(0, nl.full((1, 1), 8, "int32")))


@breaks("dma_transpose", "src is float32: hwdge transposes elements of 2 bytes")
def hardware_transpose_of_float32():
    nisa.dma_transpose(sb((8, 16)), hbm((16, 8)), dge_mode=nisa.dge_mode.hwdge)


@breaks("dma_transpose", "src has 32 rows: hwdge transposes 16 of a 2-d tile")
def hardware_transpose_of_32_rows():
    nisa.dma_transpose(sb((8, 32), "bfloat16"), hbm((32, 8), "bfloat16"), dge_mode=nisa.dge_mode.hwdge)


@breaks("dma_transpose", "dst has shape (16, 8): the transpose has (8, 16)")
def transpose_into_the_same_shape():
    nisa.dma_transpose(sb((16, 8), "bfloat16"), hbm((16, 8), "bfloat16"))


@breaks("dma_compute", "17 srcs: 1 to 16")
def too_many_dma_sources():
    nisa.dma_compute(sb((8, 4)), [hbm((8, 4)) for _ in range(17)], nl.add)


@breaks("dma_copy", "priority needs trn3")
def dma_priority_on_trn2():
    nisa.dma_copy(sb((8, 4)), hbm((8, 4)), priority=1)


# Memory.


@breaks("tensor_copy", "src reads memory of float32 (8, 4) in sbuf that was never written")
def uninitialised_read():
    nisa.tensor_copy(sb((8, 4)), nl.ndarray((8, 4), nl.float32))


@breaks("tensor_copy", "that was never written")
def partly_initialised_read():
    tile = nl.ndarray((8, 4), nl.float32)
    nisa.memset(tile[:, 0:3], 0.0)
    nisa.tensor_copy(sb((8, 4)), tile)


@breaks("tensor_copy", "that was never written")
def read_of_an_overwritten_address():
    one = nl.ndarray((8, 64), nl.float32, nl.sbuf, address=(0, 0))
    other = nl.ndarray((8, 64), nl.float32, nl.sbuf, address=(0, 128))
    nisa.memset(one, 0.0)
    nisa.memset(other, 0.0)
    nisa.tensor_copy(sb((8, 64)), one)


@breaks("ndarray", "212992 bytes per partition of sbuf: a kernel may use 212984")
def sbuf_tensor_too_large():
    nl.ndarray((128, 53248), nl.float32)


@breaks("kernel", "240004 bytes per partition of sbuf are in use at the same time: trn2 has 212984")
def too_much_sbuf_at_a_time():
    tiles = [sb((128, 20000)) for _ in range(3)]
    total = nl.ndarray((128, 1), nl.float32)
    for tile in tiles:
        nisa.tensor_copy(total, tile[:, 0:1])


@breaks("kernel", "18432 bytes per partition of psum are in use at the same time: trn2 has 16384")
def too_many_psum_banks_at_a_time():
    banks = [filled((128, 512)) for _ in range(9)]
    total = nl.ndarray((128, 1), nl.float32)
    for bank in banks:
        nisa.tensor_copy(total, bank[:, 0:1])


@breaks("kernel", "outputs must be in shared_hbm")
def output_in_private_hbm():
    return hbm((8, 4))


@breaks("kernel", "parts of which were never written")
def unwritten_output():
    result = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
    nisa.dma_copy(result[0:4], sb((4, 4)))
    return result


@breaks("register_move", "read of a register that nothing was written to")
def unwritten_register():
    nisa.register_move(nisa.register_alloc(0), nisa.register_alloc())


@breaks("sendrecv", "a kernel on one core has no other to exchange with")
def exchange_on_one_core():
    nisa.sendrecv(sb((8, 4)), sb((8, 4)), 1, 1, 0)


# The language.


@breaks("language", "is / is not (use == and !=)")
def identity_comparison(bias=None):
    if bias is None:
        nisa.memset(nl.ndarray((8, 4), nl.float32), 0.0)


@breaks("language", "try/except")
def exception_handler():
    try:
        sb((8, 4))
    except ValueError:
        return


@breaks("language", "keyword-only parameters (*)")
def keyword_only(*, size=4):
    sb((8, size))


@breaks("language", "a dictionary with keys that are no strings")
def dictionary_of_integers():
    return {1: 2}[1]


@breaks("language", "an f-string outside of an assert")
def text_at_run_time():
    size = 4
    print(f"size {size}")


@breaks("language", "np (numpy)")
def numpy_in_a_kernel():
    return np.zeros(4)


@breaks("language", "the mutable global CASES")
def mutable_global():
    return len(CASES)


@breaks("language", "a generator expression")
def generator():
    return sum(i for i in range(4))


@nki.jit
def helper():
    return sb((8, 4))


@breaks("language", "calls helper, which is decorated with nki.jit")
def decorated_helper():
    helper()
