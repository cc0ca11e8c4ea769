"""Reductions, scans and activation functions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, rules
from vllm_neuron.kernels.simulator.errors import Broken, require
from vllm_neuron.kernels.simulator.isa.constants import reduce_cmd as Command
from vllm_neuron.kernels.simulator.isa.elementwise import scalar_operation
from vllm_neuron.kernels.simulator.isa.instruction import instruction
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.memory import issue, read, write
from vllm_neuron.kernels.simulator.operators import (
    RANGES,
    Operator,
    activate,
    alu,
    name_of,
)
from vllm_neuron.kernels.simulator.operators import (
    activation as function_named,
)
from vllm_neuron.kernels.simulator.targets import nc_version
from vllm_neuron.kernels.simulator.tensor import NkiTensor

BN_STATS = 512
"""Elements per partition that bn_stats takes at most."""


_REDUCERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add.reduce,
    "multiply": np.multiply.reduce,
    "maximum": np.maximum.reduce,
    "minimum": np.minimum.reduce,
}


def reduce_rows(op: Operator, values: np.ndarray) -> np.ndarray:
    """One value per row of (rows, elements), as (rows, 1)."""
    with np.errstate(all="ignore"):
        if op.name in _REDUCERS:
            return _REDUCERS[op.name](values, axis=1, keepdims=True)
        result = values[:, :1]
        for position in range(1, values.shape[1]):
            result = op.function(result, values[:, position : position + 1])
        return result


def reducer(op: Any) -> Operator:
    """An operator that can reduce.

    Raises:
        Broken: it cannot.
    """
    operator = alu(op)
    require(operator.identity is not None, f"{operator.name} is no reduction operator")
    return operator


@instruction
def tensor_reduce(
    machine: Machine,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """Reduce the last free dimensions of data, optionally times -1."""
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    operator = reducer(op)
    axes = sorted((a + data.ndim if a < 0 else a) for a in ([axis] if isinstance(axis, int) else list(axis)))
    require(0 not in axes, "axis 0 is the partition dimension, which cannot be reduced")
    require(
        axes == list(range(data.ndim - len(axes), data.ndim)),
        f"axis {axis} of {data.ndim} dimensions: only the last ones can be reduced",
    )
    kept = data.free_elements // int(np.prod([data.shape[a] for a in axes]))
    require(
        dst.shape[0] == data.shape[0] and dst.free_elements == kept,
        f"dst has {dst.shape[0]} partitions of {dst.free_elements}: the result has {data.shape[0]} of {kept}",
    )
    values = read(machine, data, "data")
    bitwise = operator.kind == "bitwise"
    require(not (bitwise and negate), "negate goes with arithmetic operators only")
    if bitwise:
        rules.integers(machine, "data", data)
        rules.integers(machine, "dst", dst)
    issue(machine, "vector", (dst,), (data,), op=operator.name)
    rows = values.reshape(data.shape[0] * kept, -1)
    result = reduce_rows(operator, rows if bitwise else dtypes.compute(rows))
    write(machine, dst, -result if negate else result)


@instruction
def tensor_partition_reduce(
    machine: Machine, dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None
) -> None:
    """Reduce across partitions: add, average, max, bitwise_or or bitwise_and."""
    rules.tile(machine, "data", data, (rules.SBUF,))
    rules.tile(machine, "dst", dst, (rules.SBUF,))
    average = name_of(op) == "average"
    operator = alu("add") if average else reducer(op)
    machine.limit(
        operator.name in ("add", "maximum", "bitwise_or", "bitwise_and"),
        f"{operator.name} across partitions: only add, average, max, bitwise_or and bitwise_and",
    )
    require(
        dst.shape[0] == 1 and dst.free_elements == data.free_elements,
        f"dst is {dst.shape}: the result has one partition of {data.free_elements}",
    )
    values = read(machine, data, "data").reshape(data.shape[0], -1)
    issue(machine, "gpsimd", (dst,), (data,))
    result = reduce_rows(operator, (values if operator.kind == "bitwise" else dtypes.compute(values)).T)
    write(machine, dst, result / np.float32(data.shape[0]) if average else result)


def into_registers(
    registers: np.ndarray, rows: slice, op: Operator, command: Command, values: np.ndarray, initial: Any = None
) -> np.ndarray:
    """What an engine's reduction registers hold after a command, float32 (rows, 1).

    Args:
        registers: of the engine, float32 (128,), one per partition.
        rows: the partitions of the instruction.
        op: how it reduces.
        command: what to do.
        values: float32 (rows, elements).
        initial: what load_reduce starts from.
    """
    old: np.ndarray = registers[rows].reshape(-1, 1)
    if command in (Command.reset, Command.reset_reduce):
        old = np.full_like(old, op.identity)
    elif command is Command.load_reduce:
        old = np.broadcast_to(np.asarray(initial, np.float32), old.shape)
    if command in (Command.reduce, Command.reset_reduce, Command.load_reduce):
        old = op.function(old, reduce_rows(op, values)).astype(np.float32)
    registers[rows] = old.reshape(-1)
    return old


def partitions_of(tensor: NkiTensor) -> slice:
    """The partitions of an operand."""
    return slice(tensor.start_partition, tensor.start_partition + tensor.shape[0])


def result_column(machine: Machine, role: str, target: NkiTensor, rows: int) -> NkiTensor:
    """A destination with one element per partition."""
    rules.tile(machine, role, target)
    require(
        target.shape[0] == rows and target.free_elements == 1,
        f"{role} has shape {target.shape}: it must be ({rows}, 1)",
    )
    return target


def _activated(machine: Machine, name: str, data: NkiTensor, bias: Any, scale: Any) -> np.ndarray:
    """name(data * scale + bias) in float32 (partitions, elements)."""
    factor = rules.column(machine, "scale", scale, data.shape[0])
    shift = np.float32(0) if bias is None else rules.column(machine, "bias", bias, data.shape[0], fp32=False)
    with np.errstate(all="ignore"):
        inputs = rules.rows_of(machine, "data", data) * factor + shift
    if name in RANGES:
        low, high = RANGES[name]
        outside = ~((inputs >= low) & (inputs <= high)) & np.isfinite(inputs)
        if outside.any():
            value = inputs[outside].flat[0]
            note = f"activation: {name} of {value}: outside [{low:g}, {high:g}] the result is invalid"
            machine.notes[note] += 1
    return activate(name, inputs)


@instruction
def activation(
    machine: Machine,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Command = Command.idle,
    name: str | None = None,
) -> None:
    """dst = op(data * scale + bias); sums per partition go into the engine's registers by reduce_cmd."""
    _run(machine, dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def _run(
    machine: Machine,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any,
    scale: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    reduce_cmd: Command,
) -> None:
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    rules.same_layout("data", data, "dst", dst)
    if reduce_op is not None:
        require(alu(reduce_op).name == "add", f"reduce_op {name_of(reduce_op)}: the scalar engine reduces by add only")
    machine.limit(reduce_cmd is not Command.load_reduce, "load_reduce is no command of the scalar engine")
    machine.limit(
        reduce_cmd in (Command.idle, Command.reset) or reduce_op is not None,
        f"reduce_cmd {reduce_cmd.name} without reduce_op",
    )
    function = function_named(op)
    machine.limit(
        bias is None or isinstance(bias, NkiTensor) or machine.target.version >= nc_version.gen3,
        "a constant bias needs trn2",
    )
    if isinstance(bias, NkiTensor):
        machine.limit(bias.dtype != "tfloat32", "bias is tfloat32, which it may not be")
    outputs = [dst]
    if reduce_res is not None:
        outputs.append(result_column(machine, "reduce_res", reduce_res, data.shape[0]))
    issue(machine, "scalar", outputs, (data, bias, scale), op=function, reduces=reduce_res is not None)
    results = _activated(machine, function, data, bias, scale)
    rows = partitions_of(data)
    state = into_registers(machine.scalar_registers, rows, alu("add"), reduce_cmd, results)
    write(machine, dst, results)
    if reduce_res is not None:
        write(machine, reduce_res, state, "reduce_res")


@instruction
def activation_reduce(
    machine: Machine,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> None:
    """activation with reduce_cmd.reset_reduce."""
    _run(machine, dst, op, data, bias, scale, reduce_op, reduce_res, Command.reset_reduce)


@instruction
def tensor_scalar_reduce(
    machine: Machine,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: Command = Command.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> None:
    """dst = data op0 operand0, reduced per partition into the engine's registers and reduce_res."""
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    rules.same_layout("data", data, "dst", dst)
    machine.limit(not reverse0, "reverse0 is not supported yet")
    operator, function = scalar_operation(machine, 0, op0, operand0, reverse0, data)
    require(operator.kind != "bitwise", "bitwise operators are not supported")
    reduction = reducer(reduce_op)
    machine.limit(
        reduction.name in ("add", "multiply", "maximum", "minimum"),
        f"reduce_op {reduction.name}: only add, multiply, max and min",
    )
    require(
        reduce_cmd in (Command.reset_reduce, Command.reduce, Command.load_reduce),
        f"reduce_cmd {reduce_cmd.name} is not supported",
    )
    require((reduce_init is not None) == (reduce_cmd is Command.load_reduce), "reduce_init goes with load_reduce only")
    initial = None if reduce_init is None else rules.column(machine, "reduce_init", reduce_init, data.shape[0])
    outputs = [dst] if reduce_res is None else [dst, result_column(machine, "reduce_res", reduce_res, data.shape[0])]
    issue(machine, "vector", outputs, (data, operand0))
    with np.errstate(all="ignore"):
        results = function(rules.rows_of(machine, "data", data))
    state = into_registers(machine.vector_registers, partitions_of(data), reduction, reduce_cmd, results, initial)
    write(machine, dst, results)
    if reduce_res is not None:
        write(machine, reduce_res, -state if reduce_res_negate else state, "reduce_res")


@instruction
def tensor_scalar_cumulative(
    machine: Machine,
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Command = Command.reset_reduce,
    name: str | None = None,
) -> None:
    """dst[i] = op1(op0(src[i], imm0), dst[i - 1]), from the engine's registers, the identity or imm1 on."""
    rules.tile(machine, "src", src)
    rules.tile(machine, "dst", dst)
    rules.same_layout("src", src, "dst", dst)
    for role, operand in (("src", src), ("dst", dst)):
        machine.limit(
            operand.dtype not in ("int32", "uint32"), f"{role} is {operand.dtype}: 32-bit integers are not supported"
        )
    operator, function = scalar_operation(machine, 0, op0, imm0, False, src)
    second = alu(op1)
    require(operator.kind != "bitwise", "bitwise operators are not supported")
    require(
        second.name in ("add", "subtract", "multiply", "maximum", "minimum"),
        f"op1 {second.name}: only add, subtract, multiply, max and min",
    )
    require(
        reduce_cmd in (Command.reset_reduce, Command.reduce, Command.load_reduce),
        f"reduce_cmd {reduce_cmd.name} is not supported",
    )
    require((imm1 is not None) == (reduce_cmd is Command.load_reduce), "imm1 goes with load_reduce only")
    rows = partitions_of(src)
    state: np.ndarray = machine.vector_registers[rows].reshape(-1, 1)
    if reduce_cmd is Command.reset_reduce:
        state = np.full_like(state, second.identity)
    elif reduce_cmd is Command.load_reduce:
        state = np.broadcast_to(rules.column(machine, "imm1", imm1, src.shape[0]), state.shape)
    with np.errstate(all="ignore"):
        values = function(rules.rows_of(machine, "src", src))
    issue(machine, "vector", (dst,), (src, imm0, imm1))
    results = np.empty_like(values)
    for position in range(values.shape[1]):
        state = second.function(values[:, position : position + 1], state).astype(np.float32)
        results[:, position : position + 1] = state
    machine.vector_registers[rows] = state.reshape(-1)
    write(machine, dst, results)


@instruction
def tensor_tensor_scan(
    machine: Machine,
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst[i] = (data0[i] op0 dst[i - 1]) op1 data1[i], with the state in float32."""
    for role, operand in (("data0", data0), ("data1", data1), ("dst", dst)):
        rules.tile(machine, role, operand)
    rules.same_layout("data0", data0, "data1", data1)
    rules.same_layout("data0", data0, "dst", dst)
    rules.one_in_psum(machine, "data0", data0, "data1", data1)
    first, second = rules.in_isa(machine, alu(op0)), rules.in_isa(machine, alu(op1))
    if first.kind != "arithmetic" or second.kind != "arithmetic":
        raise Broken("op0 and op1 must be binary arithmetic operators")
    start = rules.column(machine, "initial", initial, data0.shape[0], fp32=False)
    left, right = rules.rows_of(machine, "data0", data0), rules.rows_of(machine, "data1", data1)
    issue(machine, "vector", (dst,), (data0, data1, initial))
    state = np.broadcast_to(start, (data0.shape[0], 1)).astype(np.float32)
    results = np.empty(left.shape, np.float32)
    with np.errstate(all="ignore"):
        for position in range(left.shape[1]):
            a, b = left[:, position : position + 1], right[:, position : position + 1]
            state = first.function(state, a) if reverse0 else first.function(a, state)
            state = second.function(b, state) if reverse1 else second.function(state, b)
            results[:, position : position + 1] = state
    write(machine, dst, results)


@instruction
def bn_stats(machine: Machine, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Count, mean and variance * count of the even, then of the odd elements of each partition: (partitions, 6)."""
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    machine.limit(
        data.free_elements <= BN_STATS, f"data has {data.free_elements} elements per partition: at most {BN_STATS}"
    )
    require(
        dst.shape[0] == data.shape[0] and dst.free_elements == 6,
        f"dst has shape {dst.shape}: it must be ({data.shape[0]}, 6)",
    )
    values = rules.rows_of(machine, "data", data)
    issue(machine, "vector", (dst,), (data,))
    columns = []
    for half in (values[:, 0::2], values[:, 1::2]):
        count = half.shape[1]
        mean = half.mean(axis=1) if count else np.zeros(values.shape[0], np.float32)
        spread = ((half - mean[:, None]) ** 2).sum(axis=1) if count else np.zeros(values.shape[0], np.float32)
        columns += [np.full(values.shape[0], count, np.float32), mean, spread]
    write(machine, dst, np.stack(columns, axis=1).astype(np.float32))


@instruction
def bn_aggr(machine: Machine, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Mean and variance of each partition, from (count, mean, variance * count) of parts: (partitions, 2)."""
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    require(data.free_elements % 3 == 0, f"data has {data.free_elements} elements per partition: a multiple of 3")
    require(
        dst.shape[0] == data.shape[0] and dst.free_elements == 2,
        f"dst has shape {dst.shape}: it must be ({data.shape[0]}, 2)",
    )
    parts = rules.rows_of(machine, "data", data).reshape(data.shape[0], -1, 3)
    issue(machine, "vector", (dst,), (data,))
    count, mean, spread = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
    total = np.maximum(count.sum(axis=1, keepdims=True), 1)
    middle = (count * mean).sum(axis=1, keepdims=True) / total
    variance = (spread + count * (mean - middle) ** 2).sum(axis=1, keepdims=True) / total
    write(machine, dst, np.concatenate([middle, variance], axis=1).astype(np.float32))
