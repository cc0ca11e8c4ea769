"""Kernels that break one documented limit each: of shapes, of the Tensor Engine and PSUM, of the other engines."""

import nki.isa as nisa
import nki.language as nl

from .limits import breaks, filled, hbm, ps, sb

FP32_MIN = -3.4028235e38

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


@breaks("tensor_copy", "dst of type float8_e4m3 gets 300: clamp to 240, overflow is undocumented")
def overflow_of_8_bit_floats():
    nisa.tensor_copy(nl.ndarray((8, 4), nl.float8_e4m3), nl.full((8, 4), 300.0, nl.float32))


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
