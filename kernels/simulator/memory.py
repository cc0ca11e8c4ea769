"""Reads and writes of tensors by instructions: addresses known at run time, initialised bytes, accumulation groups."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes
from vllm_neuron.kernels.simulator.errors import Broken, kernel_line, require
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.registers import VirtualRegister
from vllm_neuron.kernels.simulator.storage import Cell, Storage
from vllm_neuron.kernels.simulator.tensor import Indirection, NkiTensor
from vllm_neuron.kernels.simulator.trace import Instruction, access
from vllm_neuron.kernels.simulator.views import View


class Traced(Exception):
    """An instruction was checked and traced, and is not to compute."""


class Skipped(Exception):
    """The one dynamic address of an instruction is out of range and oob_mode.skip says to do nothing."""


def issue(
    machine: Machine,
    engine: str,
    writes: Sequence[NkiTensor],
    reads: Sequence[Any] = (),
    **attributes: Any,
) -> None:
    """Count an instruction, note which memory it uses and, for the cost model, what it is.

    Args:
        machine: the core.
        engine: its name.
        writes: destinations.
        reads: sources; everything that is no tensor is ignored.
        attributes: what the cost depends on besides.

    Raises:
        Traced: the machine does not compute, so that this is all.
    """
    sources = [tensor for tensor in reads if isinstance(tensor, NkiTensor)]
    for tensor in (*writes, *sources):
        lifetime = tensor.storage.lifetime
        lifetime.first = machine.clock if lifetime.first < 0 else lifetime.first
        lifetime.last = machine.clock
    machine.clock += 1
    if machine.trace is not None:
        for tensor in (*writes, *sources):
            if tensor.indirection is not None and isinstance(tensor.indirection.source, NkiTensor):
                sources.append(tensor.indirection.source)
        machine.trace.append(
            Instruction(
                machine.instruction,
                engine,
                tuple(access(tensor) for tensor in writes),
                tuple(access(tensor) for tensor in sources),
                kernel_line(),
                attributes,
            )
        )
    if not machine.values:
        raise Traced


def read(machine: Machine, tensor: NkiTensor, role: str, skip: bool = False) -> np.ndarray:
    """The elements of an operand, in the type they are stored in. Not to be written to.

    Args:
        machine: the core.
        tensor: the operand.
        role: its name, for messages.
        skip: rows with an index out of range read as 0 instead of being an error.

    Raises:
        Broken: an element was never written (strict), or lies outside of the allocation.
        Skipped: its one dynamic address is out of range, and `skip` is set.
    """
    if tensor.indirection is None:
        _check_initialised(machine, tensor, role)
        return tensor.elements()
    if not tensor.indirection.rows:
        return read(machine, _placed(machine, tensor, tensor.indirection, role, skip), role)
    index, valid = _rows(machine, tensor, tensor.indirection, role, skip)
    if not valid.any():
        return np.zeros(tensor.shape, tensor.numpy_type)
    everything = _everything(tensor)
    flat = everything.elements()
    addresses = _addresses(tensor, index, flat.size, role)
    written = tensor.storage.written
    if written is not None:
        seen = everything.elements(written).reshape(-1)[addresses[valid]]
        machine.limit(bool(seen.all()), f"{role} reads memory of {tensor!r} that was never written")
    return np.where(valid.reshape(-1, *(1,) * (tensor.ndim - 1)), flat[addresses], np.zeros((), flat.dtype))


def write(
    machine: Machine,
    tensor: NkiTensor,
    values: np.ndarray,
    role: str = "dst",
    skip: bool = False,
    cell: int = Cell.OTHER,
) -> None:
    """Store results, cast to the destination's type.

    Args:
        machine: the core.
        tensor: the destination.
        values: as many elements as it has, in row-major order; an array of the stored type is copied bit by bit.
        role: its name, for messages.
        skip: rows with an index out of range are left alone instead of being an error.
        cell: state of the written bytes of PSUM.

    Raises:
        Broken: the number of elements differs, or some lie outside of the allocation.
        Skipped: its one dynamic address is out of range, and `skip` is set.
    """
    require(values.size == tensor.size, f"{values.size} results for {role} {tensor!r}")
    if tensor.dtype in dtypes.FP8 and values.dtype == np.float32:
        _check_overflow(machine, tensor, values, role)
    result = dtypes.cast(values, tensor.data_type, tensor.numpy_type).reshape(tensor.shape)
    if tensor.indirection is None:
        tensor.elements()[...] = result
        _mark_written(machine, tensor, cell)
        return
    if not tensor.indirection.rows:
        write(machine, _placed(machine, tensor, tensor.indirection, role, skip), result, role)
        return
    index, valid = _rows(machine, tensor, tensor.indirection, role, skip)
    everything = _everything(tensor)
    addresses = _addresses(tensor, np.where(valid, index, 0), everything.size, role)[valid]
    everything.elements().reshape(-1)[addresses] = result[valid]
    written = tensor.storage.written
    if written is not None:
        everything.elements(written).reshape(-1)[addresses] = filled(tensor, 1)


def valid_rows(machine: Machine, tensor: NkiTensor, role: str) -> np.ndarray:
    """Which rows of an operand have an index in range: bool (rows,)."""
    if tensor.indirection is None or not tensor.indirection.rows:
        return np.ones(tensor.shape[0], bool)
    return _rows(machine, tensor, tensor.indirection, role, skip=True)[1]


def scalar(machine: Machine, source: Any, role: str) -> int:
    """The integer in a register, a tensor of one element, or a Python integer."""
    if isinstance(source, VirtualRegister):
        return source.read()
    if isinstance(source, NkiTensor):
        require(machine.values, f"{role} depends on a value, and this run computes none (values=False)")
        require(source.size == 1, f"{role} has an offset of {source.size} elements: it must be one")
        require(source.data_type.kind in ("int", "uint"), f"{role} has an offset of type {source.dtype}: no integer")
        return int(read(machine, source, f"offset of {role}").reshape(()).astype(np.int64))
    return int(source)


def filled(tensor: NkiTensor, byte: int) -> int:
    """An element of a map of bytes, all of whose bytes are `byte`."""
    return int.from_bytes(bytes([byte]) * tensor.numpy_type.itemsize, "little")


def _check_overflow(machine: Machine, tensor: NkiTensor, values: np.ndarray, role: str) -> None:
    """What becomes of a finite value beyond the largest 8-bit float is undocumented: kernels have to clamp."""
    largest = tensor.data_type.max
    # Up to half a step beyond it a value still rounds to the largest.
    beyond = np.isfinite(values) & (np.abs(values) > largest * (1 + 1 / 32))
    if beyond.any():
        value = float(values[beyond].flat[0])
        machine.limit(
            False, f"{role} of type {tensor.dtype} gets {value:g}: clamp to {largest:g}, overflow is undocumented"
        )


def _check_initialised(machine: Machine, tensor: NkiTensor, role: str) -> None:
    storage = tensor.storage
    if not machine.values:
        return
    written = storage.written  # once: the other core may complete it meanwhile
    if written is not None and not (tensor.elements(written) == filled(tensor, 1)).all():
        machine.limit(False, f"{role} reads memory of {tensor!r} that was never written")
        return
    if storage.cells is not None:
        cells = tensor.elements(storage.cells)
        opened = cells == filled(tensor, Cell.OPEN)
        if opened.any():
            cells[opened] = filled(tensor, Cell.READ)


def _mark_written(machine: Machine, tensor: NkiTensor, cell: int) -> None:
    storage = tensor.storage
    if storage.cells is not None:
        tensor.elements(storage.cells)[...] = filled(tensor, cell)
    if storage.address is not None and machine.pinned:
        _clobber(machine, tensor)
    written = storage.written
    if written is None:
        return
    if tensor.size * tensor.numpy_type.itemsize == storage.data.nbytes and storage.address is None:
        storage.written = None
    else:
        tensor.elements(written)[...] = filled(tensor, 1)


def _clobber(machine: Machine, tensor: NkiTensor) -> None:
    """Tensors at fixed addresses share memory: what this write overwrites is uninitialised for the others."""
    storage, size = tensor.storage, tensor.numpy_type.itemsize
    first = storage.start_byte + (tensor.offset % tensor.row_elements) * size
    last = first + (sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.strides[1:], strict=True)) + 1) * size
    rows = (tensor.start_partition, tensor.start_partition + tensor.shape[0])
    for other in machine.pinned:
        if other is not storage and other.region is storage.region and other.written is not None:
            _forget(other, rows, (first, last))


def _forget(storage: Storage, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    row = slice(max(rows[0] - storage.start_partition, 0), max(rows[1] - storage.start_partition, 0))
    column = slice(max(columns[0] - storage.start_byte, 0), max(columns[1] - storage.start_byte, 0))
    assert storage.written is not None
    storage.written.reshape(storage.partitions, storage.row_bytes)[row, column] = 0


def _placed(machine: Machine, tensor: NkiTensor, where: Indirection, role: str, skip: bool) -> NkiTensor:
    """The tensor at the one address that its indirection has now."""
    index = scalar(machine, where.source, role)
    if not 0 <= index < where.extent:
        if skip:
            raise Skipped
        raise Broken(f"{role} has a dynamic index {index} of {where.extent} (oob_mode.error)")
    layout = View(tensor.shape, tensor.strides, tensor.offset + index * where.stride)
    return tensor.moved(layout, indirection=None)


def _rows(
    machine: Machine, tensor: NkiTensor, where: Indirection, role: str, skip: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Index of every row of an indirect tensor, int64 (rows,), and which of them are in range."""
    source = where.source
    require(isinstance(source, NkiTensor), f"{role} has a vector_offset that is no tensor")
    require(source.buffer.value == "sbuf", f"{role} has its vector_offset in {source.buffer.value}: it must be in sbuf")
    require(source.data_type.kind in ("int", "uint"), f"{role} has a vector_offset of type {source.dtype}: no integer")
    found = read(machine, source, f"vector_offset of {role}").astype(np.int64)
    # Indexes of several columns count column after column, as the documentation of dma_transpose says.
    index: np.ndarray = found.reshape(found.shape[0], -1).T.reshape(-1)
    require(index.size >= tensor.shape[0], f"{role} has {tensor.shape[0]} rows and {index.size} indexes")
    index = index[: tensor.shape[0]]
    valid = (index >= 0) & (index < where.extent)
    if not skip and not valid.all():
        raise Broken(f"{role} has index {int(index[~valid][0])} of {where.extent} rows (oob_mode.error)")
    return index, valid


def _addresses(tensor: NkiTensor, index: np.ndarray, limit: int, role: str) -> np.ndarray:
    assert tensor.indirection is not None
    row = (tensor.offset + index * tensor.indirection.stride).reshape(-1, *(1,) * (tensor.ndim - 1))
    inner = np.zeros((1,) * tensor.ndim, np.int64)
    for dim in range(1, tensor.ndim):
        steps = np.arange(tensor.shape[dim]) * tensor.strides[dim]
        inner = inner + steps.reshape(-1, *(1,) * (tensor.ndim - 1 - dim))
    valid = (index >= 0) & (index < tensor.indirection.extent)
    addresses = np.where(valid.reshape(row.shape), row + inner, 0)
    require(addresses.size == 0 or addresses.max() < limit, f"{role} reaches beyond the memory of {tensor!r}")
    return addresses


def _everything(tensor: NkiTensor) -> NkiTensor:
    size = tensor.storage.data.nbytes // tensor.numpy_type.itemsize
    return tensor.moved(View((size,), (1,), 0), indirection=None)
