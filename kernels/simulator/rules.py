"""Rules that many instructions share. Those that give a result its meaning hold in both modes, the others in strict."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, views
from vllm_neuron.kernels.simulator.errors import Broken, require
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.memory import read
from vllm_neuron.kernels.simulator.operators import Operator
from vllm_neuron.kernels.simulator.storage import MemoryRegion
from vllm_neuron.kernels.simulator.targets import nc_version
from vllm_neuron.kernels.simulator.tensor import NkiTensor

SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)
ON_CHIP = (SBUF, PSUM)
FREE_DIMENSIONS = 4
"""Free dimensions of an access pattern in an instruction, at most."""


def tensor(role: str, value: Any) -> NkiTensor:
    """The operand, which must be a tensor.

    Raises:
        Broken: it is something else.
    """
    if not isinstance(value, NkiTensor):
        raise Broken(f"{role} is {type(value).__name__}, not a tensor")
    return value


def tile(machine: Machine, role: str, value: Any, regions: Sequence[MemoryRegion] = ON_CHIP) -> NkiTensor:
    """An operand on chip: where it lies, how many partitions it has, where they start and its access pattern.

    Raises:
        Broken: it breaks a rule.
    """
    operand = tensor(role, value)
    places = " or ".join(region.value for region in regions)
    require(operand.on_chip, f"{role} is in {operand.buffer.value}: it must be in {places}")
    machine.limit(operand.buffer in regions, f"{role} is in {operand.buffer.value}: it must be in {places}")
    partitions(machine, role, operand)
    pattern(machine, role, operand)
    return operand


def partitions(machine: Machine, role: str, operand: NkiTensor) -> None:
    """At most 128 partitions; more than 64 start at 0, more than 32 at 0 or 64, fewer at multiples of 32."""
    count, start = operand.shape[0], operand.start_partition
    require(count <= machine.target.partitions, f"{role} has {count} partitions: at most {machine.target.partitions}")
    if start == 0:
        return
    step = 128 if count > 64 else 64 if count > 32 else 32
    allowed = ", ".join(str(p) for p in range(0, 128, step))
    machine.limit(
        start % step == 0, f"{role} has {count} partitions from partition {start}: they may start at {allowed}"
    )


def pattern(machine: Machine, role: str, operand: NkiTensor) -> None:
    """Free dimensions (after merging contiguous ones) and step sizes of an access pattern."""
    if operand.ndim <= 2 and operand.is_contiguous():
        return
    dims = views.merged(operand.shape[1:], operand.strides[1:])
    machine.limit(
        len(dims) <= FREE_DIMENSIONS,
        f"{role} needs {len(dims)} free dimensions of access pattern: an instruction has {FREE_DIMENSIONS}",
    )
    machine.limit(
        all(-(2**15) <= stride < 2**15 and size < 2**16 for stride, size in dims),
        f"{role} has steps or sizes {dims} beyond 16 bits",
    )


def same_layout(first: str, one: NkiTensor, second: str, other: NkiTensor) -> None:
    """Two operands with equal partitions and equal elements per partition.

    Raises:
        Broken: they differ.
    """
    require(
        one.shape[0] == other.shape[0] and one.size == other.size,
        f"{first} has {one.shape[0]} partitions of {one.free_elements}, "
        f"{second} has {other.shape[0]} of {other.free_elements}",
    )


def one_in_psum(machine: Machine, first: str, one: Any, second: str, other: Any) -> None:
    """Of two inputs only one may be in PSUM."""
    both = isinstance(one, NkiTensor) and isinstance(other, NkiTensor) and one.buffer is PSUM and other.buffer is PSUM
    machine.limit(not both, f"{first} and {second} are both in psum: only one may be")


def since(machine: Machine, version: nc_version, what: str) -> None:
    """Something that older cores do not have.

    Raises:
        Broken: the target is older.
    """
    have = {nc_version.gen3: "trn2", nc_version.gen4: "trn3"}
    require(machine.target.version >= version, f"{what} needs {have[version]}; the target is {machine.target.name}")


def one_of(machine: Machine, role: str, operand: NkiTensor, names: Sequence[str]) -> None:
    """A data type out of some."""
    machine.limit(operand.dtype in names, f"{role} is {operand.dtype}: it must be {' or '.join(names)}")


def column(machine: Machine, role: str, value: Any, rows: int, fp32: bool = True) -> Any:
    """A scalar operand: a number, or one value per partition.

    Args:
        machine: the core.
        role: its name.
        value: a number or a tensor (rows, 1).
        rows: partitions of the data.
        fp32: a tensor must be float32.

    Returns:
        The number as float32, or float32 (rows, 1).

    Raises:
        Broken: it has another shape or type.
    """
    if not isinstance(value, NkiTensor):
        require(isinstance(value, int | float | np.number), f"{role} is {type(value).__name__}: a number or a tensor")
        return np.float32(value)
    operand = tile(machine, role, value)
    require(
        operand.shape[0] == rows and operand.free_elements == 1,
        f"{role} has shape {operand.shape}: it must be ({rows}, 1)",
    )
    if fp32:
        one_of(machine, role, operand, dtypes.FP32)
    return dtypes.compute(read(machine, operand, role)).reshape(rows, 1)


def rows_of(machine: Machine, role: str, operand: NkiTensor) -> np.ndarray:
    """An operand as float32 (partitions, elements per partition)."""
    return dtypes.compute(read(machine, operand, role)).reshape(operand.shape[0], -1)


def integers(machine: Machine, role: str, operand: NkiTensor) -> None:
    """An operand of a bitwise operator."""
    require(operand.data_type.kind in ("int", "uint"), f"{role} is {operand.dtype}: bitwise operators take integers")


def in_isa(machine: Machine, op: Operator) -> Operator:
    """An operator that the hardware has."""
    machine.limit(op.in_isa, f"{op.name} is no operator of the hardware")
    return op
