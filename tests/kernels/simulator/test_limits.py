"""Each documented limit, violated once, is caught in strict mode: the message names instruction, rule and line."""

from collections.abc import Callable
from typing import Any, NamedTuple

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from vllm_neuron.kernels.simulator import Violation

FP32_MIN = -3.4028235e38


class Case(NamedTuple):
    kernel: Callable[..., Any]
    instruction: str
    rule: str
    target: str


CASES: list[Case] = []


def breaks(instruction: str, rule: str, target: str = "trn2") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(kernel, instruction, rule, target))
        return kernel

    return register


def sb(shape, dtype="float32"):
    """A tile in SBUF full of 1."""
    return nl.ones(shape, dtype)


def ps(shape, dtype="float32"):
    """An uninitialised tile in PSUM."""
    return nl.ndarray(shape, dtype, nl.psum)


def filled(shape, dtype="float32"):
    """A tile in PSUM full of 1."""
    return nl.ones(shape, dtype, nl.psum)


def hbm(shape, dtype="float32"):
    """A tensor in HBM full of 1."""
    return nl.ones(shape, dtype, nl.hbm)


# Partitions, shapes and access patterns.


@breaks("ndarray", "129 partitions from partition 0: sbuf has 128")
def too_many_partitions():
    nl.ndarray((129, 4), nl.float32)


@breaks("tensor_copy", "src has 40 partitions from partition 16: they may start at 0, 64")
def start_partition_of_40():
    nisa.tensor_copy(sb((40, 4)), sb((128, 4))[16:56])


@breaks("tensor_copy", "dst has 16 partitions from partition 8: they may start at 0, 32, 64, 96")
def start_partition_of_16():
    nisa.tensor_copy(sb((128, 4))[8:24], sb((16, 4)))


@breaks("tensor_tensor", "data2 has 96 partitions from partition 32: they may start at 0")
def start_partition_of_96():
    nisa.tensor_tensor(sb((96, 4)), sb((96, 4)), sb((128, 4))[32:128], nl.add)


@breaks("kernel", "step 2 over partitions")
def stepped_partitions():
    nisa.tensor_copy(sb((64, 4)), sb((128, 4))[0:128:2])


@breaks("kernel", "partition stride 16 of an access pattern of float32 (128, 8) in sbuf: it must be 8")
def stepped_partitions_in_pattern():
    sb((128, 8)).ap([[16, 64], [1, 8]])


@breaks("kernel", "reshape of float32 (64, 8) in sbuf to (128, 4) mixes partitions and free dimensions")
def reshape_across_partitions():
    sb((64, 8)).reshape((128, 4))


@breaks("kernel", "permute(1, 0) moves the partitions")
def permute_of_partitions():
    sb((64, 64)).permute((1, 0))


@breaks("kernel", ".ap of a view with offset 4")
def pattern_of_a_view():
    sb((128, 8))[:, 4:8].ap([[8, 128], [1, 4]])


@breaks("tensor_copy", "src needs 5 free dimensions of access pattern: an instruction has 4")
def five_free_dimensions():
    nisa.tensor_copy(sb((2, 32)), sb((2, 1024)).ap([[1024, 2], [512, 2], [128, 2], [32, 2], [8, 2], [2, 2]]))


@breaks("tensor_copy", "beyond 16 bits")
def step_beyond_16_bits():
    nisa.tensor_copy(sb((1, 2)), sb((1, 40001), "uint8").ap([[40001, 1], [40000, 2]]))


@breaks("tensor_tensor", "data1 has 8 partitions of 4, data2 has 8 of 1")
def no_broadcasting():
    nisa.tensor_tensor(sb((8, 4)), sb((8, 4)), sb((8, 1)), nl.add)


@breaks("kernel", "slice to 600 of dimension 1")
def slice_beyond_the_end():
    sb((128, 512))[:, 0:600]


# The Tensor Engine and PSUM.


@breaks("nc_matmul", "moving has a free size of 513: at most 512")
def moving_too_wide():
    nisa.nc_matmul(ps((64, 513)), sb((128, 64)), sb((128, 513)), accumulate=False)


@breaks("nc_matmul", "stationary has a free size of 129: at most 128", target="trn3")
def stationary_too_wide():
    nisa.nc_matmul(ps((128, 4)), sb((8, 129)), sb((8, 4)), accumulate=False)


@breaks("nc_matmul", "stationary has 64 partitions, moving 128: they must be equal")
def contraction_mismatch():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8)), sb((128, 4)), accumulate=False)


@breaks("nc_matmul", "dst is in sbuf: it must be in psum")
def matmul_into_sbuf():
    nisa.nc_matmul(sb((8, 4)), sb((64, 8)), sb((64, 4)), accumulate=False)


@breaks("nc_matmul", "moving is in psum: it must be in sbuf")
def matmul_from_psum():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8)), filled((64, 4)), accumulate=False)


@breaks("nc_matmul", "stationary is bfloat16, moving float32: float32 pairs with float32")
def matmul_of_mixed_types():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8), "bfloat16"), sb((64, 4)), accumulate=False)


@breaks("nc_matmul", "dst is bfloat16: it must be float32")
def matmul_into_bfloat16():
    nisa.nc_matmul(ps((8, 4), "bfloat16"), sb((64, 8)), sb((64, 4)), accumulate=False)


@breaks("nc_matmul", "stationary is int32: it must be")
def matmul_of_integers():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8), "int32"), sb((64, 4), "int32"), accumulate=False)


@breaks("nc_matmul", "float8_e4m3 and float8_e4m3fn cannot be mixed", target="trn3")
def matmul_of_mixed_fp8():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8), "float8_e4m3"), sb((64, 4), "float8_e4m3fn"), accumulate=False)


@breaks("nc_matmul", "moving is float8_e4m3fn: it must be")
def ocp_fp8_on_trn2():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8), "float8_e4m3"), sb((64, 4), "float8_e4m3fn"), accumulate=False)


@breaks("nc_matmul", "double_row takes 8-bit types, not bfloat16 and bfloat16")
def double_row_of_bfloat16():
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(ps((8, 4)), sb((64, 2, 8), "bfloat16"), sb((64, 2, 4), "bfloat16"), accumulate=False, perf_mode=mode)


@breaks("nc_matmul", "tile_position (16, 0) is no place of a tile of (32, 128)")
def misplaced_row_tile():
    nisa.nc_matmul(ps((8, 4)), sb((32, 8)), sb((32, 4)), accumulate=False, tile_position=(16, 0), tile_size=(32, 128))


@breaks("nc_matmul", "the contraction has 64 partitions: at most 32")
def contraction_beyond_row_tile():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8)), sb((64, 4)), accumulate=False, tile_position=(0, 0), tile_size=(32, 128))


@breaks("nc_matmul", "a matmul writes within one bank of 2048")
def matmul_across_banks():
    nisa.nc_matmul(ps((8, 1024))[:, 256:768], sb((64, 8)), sb((64, 512)), accumulate=False)


@breaks("nc_matmul", "accumulate=True onto psum that no matmul with accumulate=False opened: nothing was written to it")
def accumulation_onto_nothing():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8)), sb((64, 4)), accumulate=True)


@breaks("nc_matmul", "another instruction wrote to it")
def accumulation_onto_memset():
    nisa.nc_matmul(filled((8, 4)), sb((64, 8)), sb((64, 4)), accumulate=True)


@breaks("nc_matmul", "it was read since, which ended its group")
def accumulation_after_a_read():
    group = ps((8, 4))
    nisa.nc_matmul(group, sb((64, 8)), sb((64, 4)), accumulate=False)
    nisa.tensor_copy(sb((8, 4)), group)
    nisa.nc_matmul(group, sb((64, 8)), sb((64, 4)), accumulate=True)


@breaks("nc_matmul", "accumulate is not given")
def implicit_accumulation():
    nisa.nc_matmul(ps((8, 4)), sb((64, 8)), sb((64, 4)))


@breaks("nc_transpose", "data is 128 x 129: the tensor engine transposes up to 128 x 128")
def transpose_too_large():
    nisa.nc_transpose(ps((128, 128)), sb((128, 129)))


@breaks("nc_transpose", "data is 64 x 8: the vector engine transposes up to 32 x 32")
def vector_transpose_too_large():
    nisa.nc_transpose(sb((8, 64)), sb((64, 8)), engine=nisa.engine.vector)


@breaks("nc_transpose", "dst is float32: a transpose keeps the type bfloat16")
def transpose_with_cast():
    nisa.nc_transpose(ps((8, 64)), sb((64, 8), "bfloat16"))


@breaks("ndarray", "16388 bytes per partition of psum: it has 16384 (8 banks)")
def psum_tensor_too_large():
    ps((128, 4097))


@breaks("ndarray", "psum address 100 is no multiple of a bank")
def psum_address_inside_a_bank():
    nl.ndarray((128, 64), nl.float32, nl.psum, address=(0, 100))


# Vector, Scalar and GpSimd Engines.


@breaks("tensor_tensor", "data1 and data2 are both in psum: only one may be")
def both_inputs_in_psum():
    nisa.tensor_tensor(sb((8, 4)), filled((8, 4)), filled((8, 4)), nl.add)


@breaks("tensor_tensor", "data1 is in psum, which the gpsimd engine cannot access")
def gpsimd_on_psum():
    nisa.tensor_tensor(sb((8, 4)), filled((8, 4)), sb((8, 4)), nl.add, engine=nisa.engine.gpsimd)


@breaks("iota", "dst is in psum: it must be in sbuf")
def iota_into_psum():
    nisa.iota(ps((8, 4)), [[1, 4]])


@breaks("affine_select", "on_true_tile is in psum: it must be in sbuf")
def affine_select_from_psum():
    nisa.affine_select(sb((8, 4)), [[1, 4]], 1, filled((8, 4)), 0.0, nl.greater_equal)


@breaks("activation", "data is in private_hbm: it must be in sbuf or psum")
def engine_on_hbm():
    nisa.activation(sb((8, 4)), nl.exp, hbm((8, 4)))


@breaks("tensor_scalar", "operand0 is bfloat16: it must be float32 or tfloat32")
def operand_of_bfloat16():
    nisa.tensor_scalar(sb((8, 4)), sb((8, 4)), nl.multiply, sb((8, 1), "bfloat16"))


@breaks("tensor_scalar", "operand0 has shape (8, 4): it must be (8, 1)")
def operand_of_a_row():
    nisa.tensor_scalar(sb((8, 4)), sb((8, 4)), nl.multiply, sb((8, 4)))


@breaks("tensor_scalar", "maximum on the scalar engine: it has multiply then add, multiply, and add")
def operator_of_the_scalar_engine():
    nisa.tensor_scalar(sb((8, 4)), sb((8, 4)), nl.maximum, 0.0, engine=nisa.engine.scalar)


@breaks("tensor_scalar", "data is float32: bitwise operators take integers")
def bitwise_on_floats():
    nisa.tensor_scalar(sb((8, 4)), sb((8, 4)), nl.bitwise_and, 3)


@breaks("tensor_scalar", "op0 and op1 must both be bitwise or both be arithmetic")
def mixed_operators():
    nisa.tensor_scalar(sb((8, 4), "int32"), sb((8, 4), "int32"), nl.bitwise_and, 3, op1=nl.add, operand1=1.0)


@breaks("tensor_tensor", "divide is no operator of the hardware")
def division():
    nisa.tensor_tensor(sb((8, 4)), sb((8, 4)), sb((8, 4)), nl.divide)


@breaks("activation", "scale is bfloat16: it must be float32 or tfloat32")
def scale_of_bfloat16():
    nisa.activation(sb((8, 4)), nl.exp, sb((8, 4)), scale=sb((8, 1), "bfloat16"))


@breaks("activation", "reduce_op maximum: the scalar engine reduces by add only")
def activation_reduces_by_maximum():
    nisa.activation(
        sb((8, 4)),
        nl.exp,
        sb((8, 4)),
        reduce_op=nl.maximum,
        reduce_res=sb((8, 1)),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


@breaks("tensor_reduce", "axis 0 is the partition dimension, which cannot be reduced")
def reduction_over_partitions():
    nisa.tensor_reduce(sb((1, 4)), nl.add, sb((8, 4)), axis=0)


@breaks("tensor_reduce", "axis 1 of 3 dimensions: only the last ones can be reduced")
def reduction_of_a_middle_axis():
    nisa.tensor_reduce(sb((8, 4)), nl.add, sb((8, 2, 4)), axis=1)


@breaks("memset", "value 0.5 is no integer, dst is int32")
def float_into_integers():
    nisa.memset(sb((8, 4), "int32"), 0.5)


@breaks("range_select", "on_false_value is 0.0: it must be -3.402")
def other_false_value():
    nisa.range_select(sb((8, 4)), sb((8, 4)), nl.greater_equal, nl.less, sb((8, 1)), sb((8, 1)), on_false_value=0.0)


@breaks("range_select", "bound0 is int32: it must be float32 or tfloat32")
def integer_bounds():
    bound = sb((8, 1), "int32")
    nisa.range_select(sb((8, 4)), sb((8, 4)), nl.greater_equal, nl.less, bound, bound, on_false_value=FP32_MIN)


@breaks("tensor_copy_predicated", "predicate is float32: it must be uint8 or uint16 or uint32")
def predicate_of_floats():
    nisa.tensor_copy_predicated(sb((8, 4)), sb((8, 4)), sb((8, 4)))


@breaks("max8", "src has 7 elements per partition: at least 8")
def too_few_for_max8():
    nisa.max8(sb((8, 8)), sb((8, 7)))


@breaks("max8", "src has 16385 elements per partition: at most 16384")
def too_many_for_max8():
    nisa.max8(sb((8, 8)), sb((8, 16385)))


@breaks("bn_stats", "data has 513 elements per partition: at most 512")
def too_many_for_bn_stats():
    nisa.bn_stats(sb((8, 6)), sb((8, 513)))


@breaks("nc_stream_shuffle", "shuffle_mask has 31 entries: it has 32")
def short_shuffle_mask():
    nisa.nc_stream_shuffle(sb((32, 4)), sb((32, 4)), [0] * 31)


@breaks("nc_n_gather", "indices is int32: it must be uint32")
def signed_gather_indexes():
    nisa.nc_n_gather(sb((8, 4)), sb((8, 4)), sb((8, 4), "int32"))


@breaks("tensor_scalar_cumulative", "src is int32: 32-bit integers are not supported")
def cumulative_integers():
    nisa.tensor_scalar_cumulative(sb((8, 4)), sb((8, 4), "int32"), nl.multiply, nl.add, 1.0)


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kernel.__name__)
def test_violated_limit_is_caught(case: Case) -> None:
    with pytest.raises(Violation) as raised:
        nki.simulate(case.kernel, target=case.target)()
    violation = raised.value
    assert violation.instruction == case.instruction
    assert case.rule in violation.rule
    assert violation.line.startswith(f"{__file__}:")


def test_registers_have_no_python_value() -> None:
    def kernel() -> None:
        nisa.memset(sb((8, 4))[:, 0 : nisa.register_alloc(2)], 0.0)

    with pytest.raises((TypeError, Violation)):
        nki.simulate(kernel)()


def test_tensors_are_no_conditions() -> None:
    def kernel() -> None:
        if sb((8, 4)):
            sb((8, 4))

    with pytest.raises(TypeError, match="condition"):
        nki.simulate(kernel)()


def test_a_message_names_instruction_rule_shapes_and_line() -> None:
    def kernel() -> None:
        nisa.tensor_tensor(sb((8, 4)), sb((8, 4)), sb((8, 5)), nl.add)

    with pytest.raises(Violation) as raised:
        nki.simulate(kernel)()
    line = kernel.__code__.co_firstlineno + 1
    assert str(raised.value) == (
        "tensor_tensor: data1 has 8 partitions of 4, data2 has 8 of 5\n"
        "  operands: dst=float32 (8, 4) in sbuf, data1=float32 (8, 4) in sbuf, data2=float32 (8, 5) in sbuf\n"
        f"  at {__file__}:{line}"
    )


def test_cores_that_take_different_paths_deadlock() -> None:
    def kernel() -> None:
        shared = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.core_barrier(shared, (0, 1))

    with pytest.raises(Violation, match="the other core did not come to this core_barrier"):
        nki.simulate(kernel)[2]()


def test_compatible_mode_counts_what_it_lets_pass() -> None:
    def kernel() -> None:
        nisa.tensor_tensor(sb((8, 4)), filled((8, 4)), filled((8, 4)), nl.add)

    run = nki.simulate(kernel, strict=False).run()
    assert run.notes == {"tensor_tensor: data1 and data2 are both in psum: only one may be": 1}
