"""Instructions that only NeuronCore-v4 (trn3) has: microscaling formats, and activations of the newer engines."""

from typing import Any

import ml_dtypes
import numpy as np

from vllm_neuron.kernels.simulator import dtypes, rules
from vllm_neuron.kernels.simulator.errors import require
from vllm_neuron.kernels.simulator.isa.constants import reduce_cmd as Command
from vllm_neuron.kernels.simulator.isa.elementwise import scalar_operation
from vllm_neuron.kernels.simulator.isa.instruction import instruction
from vllm_neuron.kernels.simulator.isa.reductions import into_registers, partitions_of, result_column
from vllm_neuron.kernels.simulator.isa.tensor_engine import accumulated, accumulation, bank, tiles
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.memory import issue, read, write
from vllm_neuron.kernels.simulator.operators import activate, alu, name_of
from vllm_neuron.kernels.simulator.operators import activation as function_named
from vllm_neuron.kernels.simulator.targets import nc_version
from vllm_neuron.kernels.simulator.tensor import NkiTensor

_ELEMENTS = {
    "float8_e4m3fn_x4": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "float8_e5m2_x4": (np.dtype(ml_dtypes.float8_e5m2), 15),
}
"""Packed types to the type of one element and its largest exponent."""
PACKED = (*_ELEMENTS, "float4_e2m1fn_x4")
GROUP = 8
"""Partitions that share a scale, of four elements each."""
QUADRANT = 32


def unpacked(values: np.ndarray, name: str) -> np.ndarray:
    """Packed values (partitions, n) as float32 (partitions, n, 4), the lowest bits first."""
    if name == "float4_e2m1fn_x4":
        digits = (values[..., None].astype(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16)) & 0xF
        return digits.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    element, _ = _ELEMENTS[name]
    return np.ascontiguousarray(values).view(element).reshape(*values.shape, 4).astype(np.float32)


def _scale_rows(partitions: int) -> np.ndarray:
    """The partition, within a scale tensor, of each group of 8 partitions: 0 to 3 of every quadrant."""
    groups = np.arange(partitions // GROUP)
    per_quadrant = QUADRANT // GROUP
    return groups // per_quadrant * QUADRANT + groups % per_quadrant


def _scales(machine: Machine, role: str, scale: NkiTensor, partitions: int, columns: int) -> np.ndarray:
    """Scales as float32 (groups, columns): powers of two in e8m0."""
    rules.tile(machine, role, scale, (rules.SBUF,))
    rules.one_of(machine, role, scale, ("float8_e8m0fnu", "uint8"))
    rows = _scale_rows(partitions)
    require(scale.shape[0] > rows[-1], f"{role} has {scale.shape[0]} partitions: groups reach to {rows[-1]}")
    require(
        scale.free_elements == columns, f"{role} has {scale.free_elements} elements per partition: {columns} are needed"
    )
    taken = np.stack([read(machine, scale[int(r) : int(r) + 1], role).reshape(-1) for r in rows])
    return np.exp2(taken.view(np.uint8).astype(np.float32) - 127)


@instruction
def quantize_mx(
    machine: Machine, dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None
) -> None:
    """dst = src / scale in a packed 8-bit format; one scale 2^(floor(log2 max) - (Emax - 1)) per 8 partitions x 4."""
    rules.since(machine, nc_version.gen4, "quantize_mx")
    for role, operand in (("src", src), ("dst", dst), ("dst_scale", dst_scale)):
        rules.tile(machine, role, operand, (rules.SBUF,))
    rules.one_of(machine, "src", src, ("float16", "bfloat16"))
    rules.one_of(machine, "dst_scale", dst_scale, ("float8_e8m0fnu", "uint8"))
    require(dst.dtype in _ELEMENTS, f"dst is {dst.dtype}: it must be {' or '.join(_ELEMENTS)}")
    partitions = src.shape[0]
    require(partitions % QUADRANT == 0, f"src has {partitions} partitions: a multiple of {QUADRANT}")
    require(src.free_elements % 4 == 0, f"src has {src.free_elements} elements per partition: a multiple of 4")
    columns = src.free_elements // 4
    require(
        dst.shape[0] == partitions and dst.free_elements == columns,
        f"dst has shape {dst.shape}: the result is ({partitions}, {columns})",
    )
    require(
        dst_scale.free_elements == columns, f"dst_scale has {dst_scale.free_elements} elements per partition: {columns}"
    )
    element, largest = _ELEMENTS[dst.dtype]
    values = rules.rows_of(machine, "src", src).reshape(partitions // GROUP, GROUP, columns, 4)
    issue(machine, "vector", (dst, dst_scale), (src,))
    top = np.abs(values).max(axis=(1, 3))
    with np.errstate(divide="ignore"):
        exponent = np.where(top > 0, np.floor(np.log2(top)) - (largest - 1), -127)
    exponent = np.clip(exponent, -127, 127)
    scaled = (values / np.exp2(exponent)[:, None, :, None]).astype(np.float32).astype(element)
    write(machine, dst, np.ascontiguousarray(scaled).view(np.uint32).reshape(partitions, columns))
    codes = (exponent + 127).astype(np.uint8).view(dst_scale.numpy_type)
    for group, row in enumerate(_scale_rows(partitions)):
        write(machine, dst_scale[int(row) : int(row) + 1], codes[group], "dst_scale")


@instruction
def nc_matmul_mx(
    machine: Machine,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> None:
    """dst[M, N] = stationary.T @ moving of packed operands [K, M] and [K, N] with scales; it contracts 4 K values."""
    rules.since(machine, nc_version.gen4, "nc_matmul_mx")
    rules.tile(machine, "stationary", stationary, (rules.SBUF,))
    rules.tile(machine, "moving", moving, (rules.SBUF,))
    rules.tile(machine, "dst", dst, (rules.PSUM,))
    rules.one_of(machine, "dst", dst, ("float32", "bfloat16"))
    for role, operand in (("stationary", stationary), ("moving", moving)):
        require(operand.dtype in PACKED, f"{role} is {operand.dtype}: it must be {' or '.join(PACKED)}")
    depth, rows, columns = stationary.shape[0], stationary.free_elements, moving.free_elements
    require(
        depth == moving.shape[0], f"stationary has {depth} partitions, moving {moving.shape[0]}: they must be equal"
    )
    require(depth % QUADRANT == 0, f"stationary has {depth} partitions: a multiple of {QUADRANT}")
    machine.limit(rows % 2 == 0, f"stationary has a free size of {rows}: it must be even")
    tiles(machine, depth, rows, tile_position, tile_size)
    require(
        dst.shape[0] == rows and dst.free_elements == columns,
        f"dst has {dst.shape[0]} partitions of {dst.free_elements}: the product is ({rows}, {columns})",
    )
    limit = machine.target.matmul_moving_bf16 if dst.dtype == "bfloat16" else machine.target.matmul_moving
    machine.limit(columns <= limit, f"moving has a free size of {columns}: at most {limit}")
    bank(machine, dst)
    where = accumulation(machine, dst, accumulate)
    operands = []
    for role, operand, scale in (("stationary", stationary, stationary_scale), ("moving", moving, moving_scale)):
        values = unpacked(read(machine, operand, role).reshape(depth, -1), operand.dtype)
        factors = np.repeat(_scales(machine, f"{role}_scale", scale, depth, operand.free_elements), GROUP, axis=0)
        operands.append((values * factors[:, :, None]).transpose(0, 2, 1).reshape(depth * 4, -1))
    issue(
        machine, "tensor", (dst,), (stationary, moving, stationary_scale, moving_scale),
        depth=depth, rows=rows, columns=columns, double_row=False, transpose=False,
    )  # fmt: skip
    accumulated(machine, dst, operands[0].T @ operands[1], where)


@instruction
def exponential(
    machine: Machine,
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Command = Command.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> None:
    """dst = exp(src - max_value) on the Vector Engine; sums per partition go into its registers by reduce_cmd."""
    rules.since(machine, nc_version.gen4, "exponential")
    rules.tile(machine, "src", src)
    rules.tile(machine, "dst", dst)
    rules.same_layout("src", src, "dst", dst)
    top = rules.column(machine, "max_value", max_value, src.shape[0])
    initial = rules.column(machine, "reduce_init", reduce_init, src.shape[0])
    outputs = [dst] if reduce_res is None else [dst, result_column(machine, "reduce_res", reduce_res, src.shape[0])]
    values = activate("exp", rules.rows_of(machine, "src", src) - top)
    issue(machine, "vector", outputs, (src, max_value))
    state = into_registers(machine.vector_registers, partitions_of(src), alu("add"), reduce_cmd, values, initial)
    write(machine, dst, values)
    if reduce_res is not None:
        write(machine, reduce_res, state, "reduce_res")


@instruction
def activate2(
    machine: Machine,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Command = Command.idle,
    name: str | None = None,
) -> None:
    """dst = op((data op0 imm0) op1 imm1); reductions per partition go into the Scalar Engine's registers."""
    rules.since(machine, nc_version.gen4, "activate2")
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    rules.same_layout("data", data, "dst", dst)
    function = function_named(op)
    steps = [
        scalar_operation(machine, number, operator, operand, reverse, data)[1]
        for number, (operator, operand, reverse) in enumerate(((op0, imm0, reverse0), (op1, imm1, reverse1)))
        if operator is not None and name_of(operator) != "bypass"
    ]
    slope = rules.column(machine, "relu_param", relu_param, data.shape[0])
    outputs = [dst] if reduce_res is None else [dst, result_column(machine, "reduce_res", reduce_res, data.shape[0])]
    values = rules.rows_of(machine, "data", data)
    with np.errstate(all="ignore"):
        for step in steps:
            values = dtypes.compute(step(values))
    values = activate(function, values, slope)
    issue(machine, "scalar", outputs, (data, imm0, imm1), op=function, reduces=reduce_res is not None)
    reduction = alu("add" if reduce_op is None else reduce_op)
    state = into_registers(machine.scalar_registers, partitions_of(data), reduction, reduce_cmd, values)
    write(machine, dst, values)
    if reduce_res is not None:
        write(machine, reduce_res, state, "reduce_res")
