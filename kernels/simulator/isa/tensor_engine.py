"""Instructions of the Tensor Engine."""

from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, rules
from vllm_neuron.kernels.simulator.errors import require
from vllm_neuron.kernels.simulator.isa.constants import engine as Engine
from vllm_neuron.kernels.simulator.isa.constants import matmul_perf_mode
from vllm_neuron.kernels.simulator.isa.instruction import chosen, instruction
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.memory import filled, issue, read, write
from vllm_neuron.kernels.simulator.storage import Cell
from vllm_neuron.kernels.simulator.targets import nc_version
from vllm_neuron.kernels.simulator.tensor import NkiTensor

ARRAY = 128
"""Rows and columns of the systolic array."""
VECTOR_TRANSPOSE = 32
"""Rows and columns that the Vector Engine transposes at most."""
MATMUL_TYPES = ("float8_e4m3", "float8_e5m2", "bfloat16", "float16", "tfloat32", "float32")


@instruction
def nc_matmul(
    machine: Machine,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> None:
    """dst[M, N] = stationary[K, M].T @ moving[K, N], in float32, optionally onto what dst holds.

    K <= 128 partitions, M <= 128, N <= 512 (trn2). With perf_mode.double_row (8-bit types) the operands are [K, 2, M]
    and [K, 2, N].
    """
    rules.tile(machine, "stationary", stationary, (rules.SBUF,))
    rules.tile(machine, "moving", moving, (rules.SBUF,))
    rules.tile(machine, "dst", dst, (rules.PSUM,))
    double = perf_mode is matmul_perf_mode.double_row
    _matmul_types(machine, dst, stationary, moving, is_transpose, double)
    depth = stationary.shape[0]
    require(
        depth == moving.shape[0], f"stationary has {depth} partitions, moving {moving.shape[0]}: they must be equal"
    )
    if double:
        require(
            stationary.ndim == 3 and moving.ndim == 3 and stationary.shape[1] == moving.shape[1] == 2,
            f"double_row takes [K, 2, M] and [K, 2, N], not {stationary.shape} and {moving.shape}",
        )
    pairs = 2 if double else 1
    rows, columns = stationary.free_elements // pairs, moving.free_elements // pairs
    tiles(machine, depth, rows, tile_position, tile_size, double)
    require(
        dst.shape[0] == rows and dst.free_elements == columns,
        f"dst has {dst.shape[0]} partitions of {dst.free_elements}: the product is ({rows}, {columns})",
    )
    limit = machine.target.matmul_moving_bf16 if dst.dtype == "bfloat16" else machine.target.matmul_moving
    limit = max(limit, machine.target.matmul_moving)
    machine.limit(columns <= limit, f"moving has a free size of {columns}: at most {limit}")
    bank(machine, dst)
    accumulates = accumulation(machine, dst, accumulate) if not is_transpose else False

    issue(
        machine, "tensor", (dst,), (stationary, moving, *((dst,) if np.any(accumulates) else ())),
        depth=depth, rows=rows, columns=columns, double_row=double, transpose=is_transpose,
        onezero=bool(is_stationary_onezero or is_moving_onezero),
    )  # fmt: skip
    left, right = read(machine, stationary, "stationary"), read(machine, moving, "moving")
    if is_transpose:
        write(machine, dst, _transposed(left.reshape(depth, -1), right.reshape(depth, -1)))
        return
    with np.errstate(all="ignore"):
        product = _operand(left, stationary, pairs).T @ _operand(right, moving, pairs)
    accumulated(machine, dst, product, accumulates)


def _operand(values: np.ndarray, operand: NkiTensor, pairs: int) -> np.ndarray:
    """float32 (K, free), where double_row contracts its pairs too."""
    flat = dtypes.compute(values)
    flat = dtypes.round_tf32(flat) if operand.dtype == "tfloat32" else flat
    return flat.reshape(flat.shape[0] * pairs, -1)


def _transposed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The transpose of `left`, bit by bit where `right` is the identity."""
    if right.shape == (left.shape[0],) * 2 and (dtypes.compute(right) == np.eye(left.shape[0])).all():
        return left.T
    return dtypes.compute(left).T @ dtypes.compute(right)


def _matmul_types(
    machine: Machine, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, transpose: bool, double: bool
) -> None:
    newer = machine.target.version >= nc_version.gen4
    types = (*MATMUL_TYPES, "float8_e4m3fn") if newer else MATMUL_TYPES
    rules.one_of(machine, "stationary", stationary, types)
    rules.one_of(machine, "moving", moving, types)
    pair = {stationary.dtype, moving.dtype}
    single = [name in dtypes.FP32 for name in pair]
    machine.limit(
        all(single) or not any(single),
        f"stationary is {stationary.dtype}, moving {moving.dtype}: float32 pairs with float32",
    )
    machine.limit(
        not {"float8_e4m3", "float8_e4m3fn"} <= pair, "float8_e4m3 and float8_e4m3fn cannot be mixed in a matmul"
    )
    if double:
        machine.limit(
            pair <= set(dtypes.FP8), f"double_row takes 8-bit types, not {stationary.dtype} and {moving.dtype}"
        )
    if transpose:
        machine.limit(
            dst.dtype == stationary.dtype, f"dst is {dst.dtype}: a transpose keeps the type {stationary.dtype}"
        )
    else:
        rules.one_of(machine, "dst", dst, ("float32", "bfloat16") if newer else ("float32",))


def tiles(machine: Machine, depth: int, rows: int, position: Any, size: Any, double: bool = False) -> None:
    """Row and column tiling: a stationary operand smaller than the array takes a part of it."""
    position, size = tuple(position or ()), tuple(size or ())
    machine.limit(bool(position) == bool(size), "tile_position and tile_size must both be set")
    tall, wide = size or (ARRAY, ARRAY)
    for what, extent, start in (("row", tall, position[:1]), ("column", wide, position[1:])):
        machine.limit(extent in (32, 64, 128), f"tile_size has a {what} size of {extent}: it is 32, 64 or 128")
        machine.limit(
            all(s % extent == 0 and s + extent <= ARRAY for s in start),
            f"tile_position {position} is no place of a tile of {size}",
        )
    machine.limit(not (double and wide != ARRAY), "double_row cannot be combined with column tiling")
    machine.limit(depth <= tall, f"the contraction has {depth} partitions: at most {tall}")
    machine.limit(rows <= wide, f"stationary has a free size of {rows}: at most {wide}")


def bank(machine: Machine, dst: NkiTensor) -> None:
    """On trn2 a matmul writes within one bank of PSUM."""
    if machine.target.version >= nc_version.gen4:
        return
    size, limit = dst.data_type.size, machine.target.psum_bank_bytes
    first = dst.storage.start_byte + dst.offset % dst.row_elements * size
    last = first + (sum((n - 1) * s for n, s in zip(dst.shape[1:], dst.strides[1:], strict=True)) + 1) * size - 1
    machine.limit(
        first // limit == last // limit,
        f"dst covers bytes {first} to {last} of a psum partition: a matmul writes within one bank of {limit}",
    )


def accumulation(machine: Machine, dst: NkiTensor, accumulate: bool | None) -> np.ndarray | bool:
    """Which elements of dst a matmul adds to; all or none of them as a bool."""
    if accumulate is not None and (not accumulate or not machine.values):
        return bool(accumulate)
    cells = dst.elements(dst.storage.cells)
    if accumulate is None:
        machine.limit(False, "accumulate is not given: say accumulate=False for the first matmul of a group")
        return cells != Cell.EMPTY
    if (cells == filled(dst, Cell.OPEN)).all():
        return True
    reasons = {
        Cell.EMPTY: "nothing was written to it",
        Cell.READ: "it was read since, which ended its group",
        Cell.OTHER: "another instruction wrote to it",
    }
    reason = next(text for state, text in reasons.items() if (cells == filled(dst, state)).any())
    machine.limit(False, f"accumulate=True onto psum that no matmul with accumulate=False opened: {reason}")
    return True


def accumulated(machine: Machine, dst: NkiTensor, product: np.ndarray, where: np.ndarray | bool) -> None:
    """Write a product, or add it where an accumulation group goes on."""
    product = product.reshape(dst.shape)
    if where is True:
        product = product + dst.elements()
    elif where is not False and where.any():
        product = np.where(where, dtypes.compute(dst.elements()) + product, product)
    write(machine, dst, product, cell=Cell.OPEN)


@instruction
def nc_transpose(
    machine: Machine, dst: NkiTensor, data: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """dst = data.T of partitions and flattened free elements; up to 128 x 128 on the Tensor Engine (SBUF to PSUM), up
    to 32 x 32 on the Vector Engine.
    """
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    small = data.shape[0] <= VECTOR_TRANSPOSE and data.free_elements <= VECTOR_TRANSPOSE
    by_tensor = data.buffer is rules.SBUF and dst.buffer is rules.PSUM
    default = Engine.vector if small and not by_tensor else Engine.tensor
    picked = chosen(engine, default, (Engine.tensor, Engine.vector))
    limit = ARRAY if picked is Engine.tensor else VECTOR_TRANSPOSE
    machine.limit(
        data.shape[0] <= limit and data.free_elements <= limit,
        f"data is {data.shape[0]} x {data.free_elements}: the {picked.name} engine transposes up to {limit} x {limit}",
    )
    if picked is Engine.tensor:
        machine.limit(
            by_tensor,
            f"data in {data.buffer.value} to dst in {dst.buffer.value}: the tensor engine goes from sbuf to psum",
        )
        if by_tensor:
            bank(machine, dst)
    require(
        dst.shape[0] == data.free_elements and dst.free_elements == data.shape[0],
        f"dst is {dst.shape[0]} x {dst.free_elements}: the transpose is {data.free_elements} x {data.shape[0]}",
    )
    machine.limit(dst.dtype == data.dtype, f"dst is {dst.dtype}: a transpose keeps the type {data.dtype}")
    issue(machine, picked.name, (dst,), (data,), depth=data.shape[0], rows=data.free_elements)
    write(machine, dst, read(machine, data, "data").reshape(data.shape[0], -1).T)
