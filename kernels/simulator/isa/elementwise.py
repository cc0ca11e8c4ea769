"""Element-wise instructions of the Vector, Scalar and GpSimd Engines."""

from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, rules
from vllm_neuron.kernels.simulator.errors import require
from vllm_neuron.kernels.simulator.isa.constants import engine as Engine
from vllm_neuron.kernels.simulator.isa.instruction import chosen, instruction
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.memory import issue, read, write
from vllm_neuron.kernels.simulator.operators import Operator, alu
from vllm_neuron.kernels.simulator.targets import nc_version
from vllm_neuron.kernels.simulator.tensor import NkiTensor

_ALL = (Engine.vector, Engine.scalar, Engine.gpsimd)


def outside_psum(machine: Machine, picked: Engine, **operands: Any) -> None:
    """The GpSimd Engine cannot access PSUM."""
    if picked is Engine.gpsimd:
        for role, operand in operands.items():
            in_psum = isinstance(operand, NkiTensor) and operand.buffer is rules.PSUM
            machine.limit(not in_psum, f"{role} is in psum, which the gpsimd engine cannot access")


@instruction
def tensor_copy(
    machine: Machine, dst: NkiTensor, src: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """dst = src: bit by bit between equal types, else through float32."""
    rules.tile(machine, "src", src)
    rules.tile(machine, "dst", dst)
    rules.same_layout("src", src, "dst", dst)
    picked = chosen(engine, Engine.vector, _ALL)
    outside_psum(machine, picked, src=src, dst=dst)
    issue(machine, picked.name, (dst,), (src,))
    values = read(machine, src, "src")
    same = src.dtype == dst.dtype and picked is not Engine.scalar
    write(machine, dst, values.copy() if same else dtypes.compute(values))


@instruction
def memset(
    machine: Machine, dst: NkiTensor, value: Any, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """dst = a constant. Integer types take integers; packed types take 0 only."""
    rules.tile(machine, "dst", dst)
    kind = dst.data_type.kind
    require(isinstance(value, int | float | np.number), f"value is {type(value).__name__}, not a number")
    whole = isinstance(value, int | np.integer)
    machine.limit(whole or kind == "float", f"value {value} is no integer, dst is {dst.dtype}")
    require(kind != "packed" or value == 0, f"value {value}: {dst.dtype} can be set to 0 only")
    if kind in ("int", "uint"):
        info = np.iinfo(dst.numpy_type)
        machine.limit(info.min <= value <= info.max, f"value {value} is beyond the range of {dst.dtype}")
    picked = chosen(engine, Engine.vector, (Engine.vector, Engine.gpsimd))
    outside_psum(machine, picked, dst=dst)
    issue(machine, picked.name, (dst,), zero=value == 0)
    write(machine, dst, np.full(dst.shape, value, np.float32 if kind == "float" else np.int64))


@instruction
def tensor_tensor(
    machine: Machine,
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = data1 op data2, element by element, without broadcasting; at most one input in PSUM."""
    rules.tile(machine, "data1", data1)
    rules.tile(machine, "data2", data2)
    rules.tile(machine, "dst", dst)
    operator = rules.in_isa(machine, alu(op))
    require(operator.kind != "unary", f"{operator.name} takes one operand")
    rules.same_layout("data1", data1, "data2", data2)
    rules.same_layout("data1", data1, "dst", dst)
    rules.one_in_psum(machine, "data1", data1, "data2", data2)
    operands = (data1, data2, dst)
    exact = operator.kind == "arithmetic" and all(t.dtype in ("int32", "uint32") for t in operands)
    exact = exact and all(t.buffer is rules.SBUF for t in operands) and engine is not Engine.vector
    default = Engine.gpsimd if exact or operator.name == "power" else Engine.vector
    picked = chosen(engine, default, (Engine.vector, Engine.gpsimd))
    machine.limit(operator.name != "power" or picked is Engine.gpsimd, "power runs on the gpsimd engine")
    outside_psum(machine, picked, data1=data1, data2=data2, dst=dst)
    if operator.kind == "bitwise":
        for role, operand in (("data1", data1), ("data2", data2), ("dst", dst)):
            rules.integers(machine, role, operand)
    issue(machine, picked.name, (dst,), (data1, data2), op=operator.name)
    left, right = (read(machine, t, r).reshape(t.shape[0], -1) for t, r in ((data1, "data1"), (data2, "data2")))
    with np.errstate(all="ignore"):
        if operator.kind == "bitwise":
            result = operator.function(left, right)
        elif exact:
            result = operator.function(left.astype(np.int64), right.astype(np.int64)).astype(np.int64)
        else:
            result = operator.function(dtypes.compute(left), dtypes.compute(right))
    write(machine, dst, result)


def scalar_operation(
    machine: Machine, step: int, op: Any, operand: Any, reverse: bool, data: NkiTensor
) -> tuple[Operator, Any]:
    """An operator of tensor_scalar and its operand, as a function of the data.

    Returns:
        The operator, and a function of the values so far, float32 or integers (partitions, elements).
    """
    operator = rules.in_isa(machine, alu(op))
    role = f"operand{step}"
    if operator.kind == "unary" or operator.name == "invert":
        machine.limit(
            operand is None or (not isinstance(operand, NkiTensor) and operand == 0),
            f"{role} of the unary operator {operator.name}: it must be None or 0",
        )
        return operator, operator.function
    require(operand is not None, f"{role} of {operator.name} is missing")
    if operator.kind == "bitwise":
        value: Any
        if isinstance(operand, NkiTensor):
            rules.tile(machine, role, operand)
            rules.integers(machine, role, operand)
            value = read(machine, operand, role).reshape(data.shape[0], 1)
        else:
            machine.limit(
                isinstance(operand, int | np.integer), f"{role} is {operand}: bitwise operators take integers"
            )
            value = np.asarray(int(operand)).astype(data.numpy_type)
    else:
        value = rules.column(machine, role, operand, data.shape[0])
    if reverse:
        return operator, lambda x: operator.function(np.broadcast_to(value, x.shape), x)
    return operator, lambda x: operator.function(x, value)


@instruction
def tensor_scalar(
    machine: Machine,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1; operands are constants or float32 (partitions, 1)."""
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    rules.same_layout("data", data, "dst", dst)
    steps = [scalar_operation(machine, 0, op0, operand0, reverse0, data)]
    if op1 is not None:
        steps.append(scalar_operation(machine, 1, op1, operand1, reverse1, data))
    else:
        machine.limit(operand1 is None, "operand1 without op1")
    bitwise = [operator.kind == "bitwise" for operator, _ in steps]
    require(all(bitwise) or not any(bitwise), "op0 and op1 must both be bitwise or both be arithmetic")
    names = tuple(operator.name for operator, _ in steps)
    picked = chosen(engine, Engine.vector, _ALL)
    _scalar_engines(machine, picked, names, bitwise[0])
    outside_psum(machine, picked, data=data, dst=dst)
    if bitwise[0]:
        rules.integers(machine, "data", data)
        rules.integers(machine, "dst", dst)
    issue(machine, picked.name, (dst,), (data, operand0, operand1), ops=names)
    values = read(machine, data, "data").reshape(data.shape[0], -1)
    values = values if bitwise[0] else dtypes.compute(values)
    with np.errstate(all="ignore"):
        for _, function in steps:
            values = function(values)
    write(machine, dst, np.asarray(values))


def _scalar_engines(machine: Machine, picked: Engine, names: tuple[str, ...], bitwise: bool) -> None:
    if picked is Engine.scalar:
        legal = names in (("multiply", "add"), ("multiply",), ("add",))
        machine.limit(
            legal or machine.target.version > nc_version.gen3,
            f"{' then '.join(names)} on the scalar engine: it has multiply then add, multiply, and add",
        )
    if picked is Engine.gpsimd:
        machine.limit(names == ("rsqrt",), f"{' then '.join(names)} on the gpsimd engine: it has rsqrt only")
    machine.limit(
        not bitwise or picked is Engine.vector, f"bitwise operators run on the vector engine, not on {picked.name}"
    )
    machine.limit("power" not in names or picked is not Engine.scalar, "power does not run on the scalar engine")


@instruction
def scalar_tensor_tensor(
    machine: Machine,
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1; operand0 per partition, operand1 per element."""
    for role, operand in (("data", data), ("operand1", operand1), ("dst", dst)):
        rules.tile(machine, role, operand)
    rules.same_layout("data", data, "operand1", operand1)
    rules.same_layout("data", data, "dst", dst)
    rules.one_in_psum(machine, "data", data, "operand1", operand1)
    first, function = scalar_operation(machine, 0, op0, operand0, reverse0, data)
    second = rules.in_isa(machine, alu(op1))
    require("bitwise" not in (first.kind, second.kind), "bitwise operators are not supported")
    require(second.kind == "arithmetic", f"op1 {second.name} takes one operand")
    issue(machine, "vector", (dst,), (data, operand0, operand1))
    with np.errstate(all="ignore"):
        values = function(rules.rows_of(machine, "data", data))
        other = rules.rows_of(machine, "operand1", operand1)
        write(machine, dst, second.function(other, values) if reverse1 else second.function(values, other))


@instruction
def reciprocal(machine: Machine, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst = 1 / data."""
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    rules.same_layout("data", data, "dst", dst)
    issue(machine, "vector", (dst,), (data,))
    with np.errstate(all="ignore"):
        write(machine, dst, 1 / rules.rows_of(machine, "data", data))


@instruction
def tensor_copy_predicated(
    machine: Machine,
    dst: NkiTensor,
    src: Any,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = src where predicate is not 0 (or is 0, with reverse_pred); elsewhere dst keeps its value."""
    rules.tile(machine, "predicate", predicate)
    rules.tile(machine, "dst", dst)
    rules.same_layout("predicate", predicate, "dst", dst)
    rules.one_of(machine, "predicate", predicate, ("uint8", "uint16", "uint32"))
    rules.one_in_psum(machine, "src", src, "predicate", predicate)
    if isinstance(src, NkiTensor):
        rules.tile(machine, "src", src)
        rules.same_layout("src", src, "dst", dst)
        machine.limit(src.dtype == dst.dtype, f"src is {src.dtype}, dst {dst.dtype}: they must be equal")
    issue(machine, "vector", (dst,), (src, predicate, dst))
    where = (read(machine, predicate, "predicate").reshape(dst.shape[0], -1) != 0) ^ bool(reverse_pred)
    old = (dst.elements() if where.all() else read(machine, dst, "dst")).reshape(dst.shape[0], -1)
    if isinstance(src, NkiTensor):
        new: np.ndarray = read(machine, src, "src").reshape(dst.shape[0], -1)
        new = new if src.dtype == dst.dtype else dtypes.compute(new)
    else:
        new = np.asarray(src, np.float32)
    write(machine, dst, np.where(where, dtypes.cast(new, dst.data_type, dst.numpy_type), old))


@instruction
def nc_stream_shuffle(
    machine: Machine, dst: NkiTensor, src: NkiTensor, shuffle_mask: Any, name: str | None = None
) -> None:
    """Within each quadrant of 32 partitions: partition i of dst = partition shuffle_mask[i] of src; 255 leaves it."""
    rules.tile(machine, "src", src)
    rules.tile(machine, "dst", dst)
    mask = [int(entry) for entry in shuffle_mask]
    require(len(mask) == 32, f"shuffle_mask has {len(mask)} entries: it has 32")
    require(
        all(0 <= entry < 32 or entry == 255 for entry in mask), "shuffle_mask has entries other than 0 to 31 and 255"
    )
    require(dst.dtype == src.dtype, f"dst is {dst.dtype}, src {src.dtype}: they must be equal")
    require(
        dst.free_elements == src.free_elements,
        f"dst has {dst.free_elements} elements per partition, src {src.free_elements}",
    )
    active = -(-max(dst.shape[0], src.shape[0]) // 32) * 32
    step = 128 if active > 64 else active
    for role, operand in (("src", src), ("dst", dst)):
        machine.limit(
            operand.start_partition % step == 0,
            f"{role} starts at partition {operand.start_partition}: {active} partitions start at multiples of {step}",
        )
    issue(machine, "vector", (dst,), (src,))
    values = read(machine, src, "src").reshape(src.shape[0], -1).copy()
    result = dst.elements().reshape(dst.shape[0], -1).copy()
    taken = []
    for row in range(dst.shape[0]):
        source = mask[row % 32] + row // 32 * 32
        if mask[row % 32] != 255 and source < src.shape[0]:
            result[row] = values[source]
            taken.append(row)
    for row in taken:
        write(machine, dst[row : row + 1], result[row])
