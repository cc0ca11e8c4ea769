"""Instructions of the DMA engines."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, rules
from vllm_neuron.kernels.simulator.errors import require
from vllm_neuron.kernels.simulator.isa.constants import dge_mode, oob_mode
from vllm_neuron.kernels.simulator.isa.constants import engine as Engine
from vllm_neuron.kernels.simulator.isa.instruction import instruction
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.memory import Skipped, issue, read, valid_rows, write
from vllm_neuron.kernels.simulator.operators import alu
from vllm_neuron.kernels.simulator.tensor import NkiTensor

_OUTSIDE_PSUM = (rules.SBUF, *rules.HBM)
TRANSPOSES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
"""Permutation of a DMA transpose, by number of dimensions."""
SOURCES = 16
"""Tensors that one dma_compute takes at most."""


def _gathers(*tensors: NkiTensor) -> bool:
    return any(t.indirection is not None and t.indirection.rows for t in tensors)


def _place(machine: Machine, role: str, operand: Any, regions: Sequence[Any] = _OUTSIDE_PSUM) -> NkiTensor:
    found = rules.tensor(role, operand)
    places = " or ".join(dict.fromkeys("hbm" if r in rules.HBM else r.value for r in regions))
    machine.limit(found.buffer in regions, f"{role} is in {found.buffer.value}: a DMA accesses {places}")
    if found.on_chip:
        require(found.shape[0] <= machine.target.partitions, f"{role} has {found.shape[0]} partitions: at most 128")
    return found


@instruction
def dma_copy(
    machine: Machine,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = src between HBM and SBUF, element after element in row-major order; casts through float32.

    Addresses may be dynamic: one for all (scalar_offset) or one per row (vector_offset, gather and scatter).
    """
    _place(machine, "src", src)
    _place(machine, "dst", dst)
    require(src.size == dst.size, f"src has {src.size} elements, dst {dst.size}: they must be equal")
    hardware = dge_mode.name == "hwdge"
    machine.limit(not hardware or src.dtype == dst.dtype, f"hwdge from {src.dtype} to {dst.dtype}: it cannot cast")
    machine.limit(
        dge_mode.name in ("unknown", "swdge") or not _gathers(src, dst),
        f"{dge_mode.name} with vector_offset: only swdge gathers and scatters",
    )
    machine.limit(
        dge_mode.name != "none" or not (src.is_indirect() or dst.is_indirect()), "dge_mode.none with a dynamic address"
    )
    if engine is not Engine.unknown:
        machine.limit(
            hardware and engine in (Engine.sync, Engine.scalar),
            f"engine {engine.name}: sync or scalar, with hwdge only",
        )
    machine.limit(priority is None or machine.target.name == "trn3", "priority needs trn3")
    skip = oob_mode.name == "skip"
    issue(machine, "dma", (dst,), (src,), dge=dge_mode.name, gathers=_gathers(src, dst))
    try:
        _copy(machine, dst, src, skip)
    except Skipped:
        return


def _copy(machine: Machine, dst: NkiTensor, src: NkiTensor, skip: bool) -> None:
    values = read(machine, src, "src", skip)
    if src.dtype != dst.dtype:
        values = dtypes.compute(values)
    rows = valid_rows(machine, src, "src") if skip else None
    if rows is None or rows.all():
        write(machine, dst, values.copy(), skip=skip)
        return
    # Rows whose index is out of range leave dst as it was.
    require(dst.indirection is None, "a gather with skipped rows into an indirect dst")
    width = src.size // src.shape[0]
    require(
        dst.size // dst.shape[0] == width,
        f"a gather of rows of {width} elements into rows of {dst.size // dst.shape[0]}",
    )
    for row in np.flatnonzero(rows):
        write(machine, dst[int(row) : int(row) + 1], values[row])


@instruction
def dma_transpose(
    machine: Machine,
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> None:
    """dst = src with axes (1, 0), (2, 1, 0) or (3, 1, 2, 0); src may gather rows by a vector_offset."""
    _place(machine, "src", src)
    _place(machine, "dst", dst, (rules.SBUF,))
    require(src.ndim in TRANSPOSES, f"src has {src.ndim} dimensions: 2, 3 or 4")
    order = TRANSPOSES[src.ndim]
    require(axes is None or tuple(axes) == order, f"axes {axes}: a transpose of {src.ndim} dimensions has {order}")
    machine.limit(dst.dtype == src.dtype, f"dst is {dst.dtype}, src {src.dtype}: they must be equal")
    wanted = tuple(src.shape[axis] for axis in order)
    require(dst.size == src.size, f"src has {src.size} elements, dst {dst.size}: they must be equal")
    machine.limit(dst.shape == wanted, f"dst has shape {dst.shape}: the transpose has {wanted}")
    if _gathers(src):
        _indirect_transpose(machine, src, dge_mode.name)
    elif dge_mode.name == "hwdge":
        _hardware_transpose(machine, src)
    else:
        machine.limit(dge_mode.name == "unknown", f"dge_mode {dge_mode.name}: a transpose has unknown and hwdge")
    machine.limit(src.data_type.size in (2, 4), f"src is {src.dtype}: a DMA transposes elements of 2 or 4 bytes")
    issue(machine, "dma", (dst,), (src,), dge=dge_mode.name, transposes=True, gathers=_gathers(src))
    try:
        values = read(machine, src, "src", skip=oob_mode.name == "skip")
    except Skipped:
        return
    write(machine, dst, np.transpose(values, order).copy())


def _hardware_transpose(machine: Machine, src: NkiTensor) -> None:
    machine.limit(src.data_type.size == 2, f"src is {src.dtype}: hwdge transposes elements of 2 bytes")
    machine.limit(src.shape[-1] <= 128, f"src has a last dimension of {src.shape[-1]}: hwdge transposes up to 128")
    if src.ndim == 2:
        machine.limit(src.shape[0] == 16, f"src has {src.shape[0]} rows: hwdge transposes 16 of a 2-d tile")
        return
    machine.limit(
        src.shape[0] in (1, 2, 4, 8, 16), f"src has a first dimension of {src.shape[0]}: 1, 2, 4, 8 or 16 with hwdge"
    )
    machine.limit(
        src.shape[0] * src.shape[-2] % 16 == 0,
        f"src has {src.shape[0]} x {src.shape[-2]} rows: a multiple of 16 with hwdge",
    )


def _indirect_transpose(machine: Machine, src: NkiTensor, mode: str) -> None:
    assert src.indirection is not None
    index = src.indirection.source
    machine.limit(mode in ("unknown", "swdge"), f"dge_mode {mode}: an indirect transpose has unknown and swdge")
    machine.limit(src.data_type.size == 2, f"src is {src.dtype}: an indirect transpose takes elements of 2 bytes")
    machine.limit(
        src.shape[-1] <= 128, f"src has a last dimension of {src.shape[-1]}: at most 128 in an indirect transpose"
    )
    machine.limit(src.shape[0] % 16 == 0, f"src has {src.shape[0]} rows: a multiple of 16 in an indirect transpose")
    machine.limit(src.ndim < 4 or 1 in src.shape[1:3], f"src has shape {src.shape}: dimension 1 or 2 must be 1")
    rules.one_of(machine, "indices", index, ("uint32",))
    rows = index.shape[0]
    machine.limit(rows % 16 == 0 and 16 <= rows <= 128, f"indices have {rows} partitions: 16 to 128 in steps of 16")
    machine.limit(
        index.free_elements == 1 or rows == 128, f"indices of {index.shape}: several columns need 128 partitions"
    )


@instruction
def dma_compute(
    machine: Machine,
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> None:
    """dst = sum of srcs in float32, by the DMA engines; with a vector_offset dst[rows] += src or dst += src[rows]."""
    require(1 <= len(srcs) <= SOURCES, f"{len(srcs)} srcs: 1 to {SOURCES}")
    operator = alu(reduce_op)
    require(operator.name == "add", f"reduce_op {operator.name}: only add is supported")
    require(scales is None or all(scale == 1.0 for scale in scales), f"scales {scales}: all must be 1.0")
    for position, operand in enumerate((dst, *srcs)):
        role = f"srcs[{position - 1}]" if position else "dst"
        _place(machine, role, operand)
        require(operand.size == dst.size, f"{role} has {operand.size} elements, dst {dst.size}: they must be equal")
    if _gathers(dst, *srcs):
        machine.limit(len(srcs) == 2, f"{len(srcs)} srcs with a vector_offset: exactly 2")
        machine.limit(unique_indices, "unique_indices must be True with a vector_offset")
    skip = oob_mode.name == "skip"
    issue(
        machine,
        "dma",
        (dst,),
        tuple(srcs),
        dge="swdge" if _gathers(dst, *srcs) else "none",
        gathers=_gathers(dst, *srcs),
    )
    try:
        total = np.zeros(dst.shape, np.float32)
        keep = np.ones(dst.shape[0], bool)
        for position, source in enumerate(srcs):
            total = total + dtypes.compute(read(machine, source, f"srcs[{position}]", skip)).reshape(dst.shape)
            if skip and _gathers(source) and source.shape[0] == dst.shape[0]:
                keep &= valid_rows(machine, source, f"srcs[{position}]")
        if keep.all() or _gathers(dst):
            write(machine, dst, total, skip=skip)
            return
        for row in np.flatnonzero(keep):
            write(machine, dst[int(row) : int(row) + 1], total[row])
    except Skipped:
        return
