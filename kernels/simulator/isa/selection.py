"""Patterns, masks, searches and gathers within partitions."""

from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, rules
from vllm_neuron.kernels.simulator.errors import require
from vllm_neuron.kernels.simulator.isa.constants import reduce_cmd as Command
from vllm_neuron.kernels.simulator.isa.instruction import instruction
from vllm_neuron.kernels.simulator.isa.reductions import into_registers, partitions_of, result_column
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.memory import issue, read, write
from vllm_neuron.kernels.simulator.operators import COMPARISONS, alu
from vllm_neuron.kernels.simulator.targets import nc_version
from vllm_neuron.kernels.simulator.tensor import NkiTensor

FP32_MIN = float(np.finfo(np.float32).min)
SEARCH = (8, 16384)
"""Elements per partition that max8 and its companions take, at least and at most."""


def _affine(machine: Machine, role: str, operand: NkiTensor, pattern: Any, offset: int, multiplier: int) -> np.ndarray:
    """offset + partition * multiplier + pattern, int32 (partitions, elements)."""
    require(len(pattern) <= 4, f"pattern has {len(pattern)} dimensions: at most 4")
    values = np.zeros(1, np.int64)
    for step, count in pattern:
        values = (values[:, None] + int(step) * np.arange(int(count), dtype=np.int64)).reshape(-1)
    require(
        values.size == operand.free_elements,
        f"pattern has {values.size} elements, {role} {operand.free_elements} per partition",
    )
    everything = int(offset) + np.arange(operand.shape[0], dtype=np.int64)[:, None] * int(multiplier) + values
    return everything.astype(np.int32).astype(np.int64)


@instruction
def iota(
    machine: Machine,
    dst: NkiTensor,
    pattern: Any,
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> None:
    """dst[p, ...] = offset + p * channel_multiplier + sum(step * index), in int32."""
    rules.tile(machine, "dst", dst, (rules.SBUF,))
    values = _affine(machine, "dst", dst, pattern, offset, channel_multiplier)
    issue(machine, "gpsimd", (dst,))
    write(machine, dst, values if dst.data_type.kind != "float" else values.astype(np.float32))


@instruction
def affine_select(
    machine: Machine,
    dst: NkiTensor,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: Any,
    cmp_op: Any = "equal",
    offset: int = 0,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where cmp_op(affine value, 0) holds, else on_false_value."""
    rules.tile(machine, "on_true_tile", on_true_tile, (rules.SBUF,))
    rules.tile(machine, "dst", dst, (rules.SBUF,))
    rules.same_layout("on_true_tile", on_true_tile, "dst", dst)
    compare = alu(cmp_op)
    require(compare.name in COMPARISONS, f"cmp_op {compare.name} is no comparison")
    require(isinstance(on_false_value, int | float | np.number), "on_false_value must be a number")
    where = compare.function(_affine(machine, "dst", dst, pattern, offset, channel_multiplier), 0) != 0
    issue(machine, "gpsimd", (dst,), (on_true_tile,))
    if dst.dtype == on_true_tile.dtype:
        values = read(machine, on_true_tile, "on_true_tile").reshape(dst.shape[0], -1)
        other = dtypes.cast(np.asarray(on_false_value, np.float32), dst.data_type, dst.numpy_type)
    else:
        values, other = rules.rows_of(machine, "on_true_tile", on_true_tile), np.asarray(on_false_value, np.float32)
    write(machine, dst, np.where(where, values, other))


@instruction
def range_select(
    machine: Machine,
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: Command = Command.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = "maximum",
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where both comparisons of (range_start + index) with the bounds hold, else FP32_MIN."""
    rules.since(machine, nc_version.gen3, "range_select")
    rules.tile(machine, "on_true_tile", on_true_tile)
    rules.tile(machine, "dst", dst)
    rules.same_layout("on_true_tile", on_true_tile, "dst", dst)
    machine.limit(
        on_true_tile.data_type.kind == "float", f"on_true_tile is {on_true_tile.dtype}: it must be a float type"
    )
    comparisons = [alu(comp_op0), alu(comp_op1)]
    for compare in comparisons:
        require(
            compare.name in COMPARISONS and compare.name != "not_equal",
            f"{compare.name} is no comparison that range_select has",
        )
    require(alu(reduce_op).name == "maximum", "reduce_op: only maximum is supported")
    machine.limit(
        np.float32(on_false_value) == np.float32(FP32_MIN), f"on_false_value is {on_false_value}: it must be {FP32_MIN}"
    )
    elements = on_true_tile.free_elements
    machine.limit(
        range_start + elements <= 2**24, f"indexes up to {range_start + elements}: compared in float32, up to 2^24"
    )
    bounds = []
    for role, bound in (("bound0", bound0), ("bound1", bound1)):
        require(isinstance(bound, NkiTensor), f"{role} must be a tensor")
        bounds.append(rules.column(machine, role, bound, dst.shape[0]))
    outputs = [dst] if reduce_res is None else [dst, result_column(machine, "reduce_res", reduce_res, dst.shape[0])]
    if reduce_res is not None:
        machine.limit(
            dst.data_type.size == 4 or reduce_res.dtype == "float32",
            f"reduce_res is {reduce_res.dtype} and dst {dst.dtype}: it must be float32, or masked rows become NaN",
        )
    index = (range_start + np.arange(elements)).astype(np.float32)
    where = np.ones((dst.shape[0], elements), bool)
    for compare, bound in zip(comparisons, bounds, strict=True):
        where &= compare.function(index, bound) != 0
    issue(machine, "vector", outputs, (on_true_tile, bound0, bound1))
    values = np.where(where, rules.rows_of(machine, "on_true_tile", on_true_tile), np.float32(on_false_value))
    state = into_registers(machine.vector_registers, partitions_of(dst), alu("maximum"), reduce_cmd, values)
    write(machine, dst, values)
    if reduce_res is not None:
        write(machine, reduce_res, np.maximum(state, np.float32(FP32_MIN)), "reduce_res")


@instruction
def select_reduce(
    machine: Machine,
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Command = Command.idle,
    reduce_op: Any = "maximum",
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = on_true where predicate holds, else on_false (a number or one per partition); reduces by maximum."""
    for role, operand in (("predicate", predicate), ("on_true", on_true), ("dst", dst)):
        rules.tile(machine, role, operand)
    rules.same_layout("predicate", predicate, "dst", dst)
    rules.same_layout("on_true", on_true, "dst", dst)
    rules.one_in_psum(machine, "on_true", on_true, "predicate", predicate)
    rules.one_of(machine, "predicate", predicate, ("int8", "uint8", "int16", "uint16"))
    machine.limit(
        on_true.dtype not in ("tfloat32", "int32", "uint32"), f"on_true is {on_true.dtype}, which is not supported"
    )
    require(alu(reduce_op).name == "maximum", "reduce_op: only maximum is supported")
    other = rules.column(machine, "on_false", on_false, dst.shape[0], fp32=False)
    outputs = [dst] if reduce_res is None else [dst, result_column(machine, "reduce_res", reduce_res, dst.shape[0])]
    where = (read(machine, predicate, "predicate").reshape(dst.shape[0], -1) != 0) ^ bool(reverse_pred)
    issue(machine, "vector", outputs, (predicate, on_true, on_false))
    values = np.where(where, rules.rows_of(machine, "on_true", on_true), other).astype(np.float32)
    state = into_registers(machine.vector_registers, partitions_of(dst), alu("maximum"), reduce_cmd, values)
    write(machine, dst, values)
    if reduce_res is not None:
        write(machine, reduce_res, state, "reduce_res")


def _searched(machine: Machine, role: str, operand: NkiTensor) -> np.ndarray:
    low, high = SEARCH
    require(low <= operand.free_elements, f"{role} has {operand.free_elements} elements per partition: at least {low}")
    machine.limit(
        operand.free_elements <= high, f"{role} has {operand.free_elements} elements per partition: at most {high}"
    )
    machine.limit(operand.ndim <= 3, f"{role} has {operand.ndim} dimensions: at most 3")
    return rules.rows_of(machine, role, operand)


def _eight(role: str, operand: NkiTensor, rows: int) -> None:
    require(
        operand.shape[0] == rows and operand.free_elements == 8,
        f"{role} has shape {operand.shape}: it must be ({rows}, 8)",
    )


@instruction
def max8(machine: Machine, dst: NkiTensor, src: NkiTensor, name: str | None = None) -> None:
    """The 8 largest values of each partition, descending."""
    rules.tile(machine, "src", src)
    rules.tile(machine, "dst", dst)
    _eight("dst", dst, src.shape[0])
    values = _searched(machine, "src", src)
    issue(machine, "vector", (dst,), (src,))
    write(machine, dst, np.sort(values, axis=1)[:, ::-1][:, :8])


@instruction
def nc_find_index8(machine: Machine, dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> None:
    """Index of the first occurrence of each of 8 values; equal values get successive ones; all ones if absent."""
    for role, operand in (("data", data), ("vals", vals), ("dst", dst)):
        rules.tile(machine, role, operand)
    _eight("vals", vals, data.shape[0])
    _eight("dst", dst, data.shape[0])
    rules.one_of(machine, "dst", dst, ("uint16", "uint32"))
    values, wanted = _searched(machine, "data", data), rules.rows_of(machine, "vals", vals)
    issue(machine, "vector", (dst,), (data, vals))
    found = np.full(wanted.shape, np.iinfo(dst.numpy_type).max, np.int64)
    for row in range(values.shape[0]):
        places = {value: list(np.flatnonzero(values[row] == value)) for value in set(wanted[row].tolist())}
        for slot, value in enumerate(wanted[row].tolist()):
            if places[value]:
                found[row, slot] = places[value].pop(0)
    write(machine, dst, found)


@instruction
def nc_match_replace8(
    machine: Machine,
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> None:
    """dst = data with the first occurrence of each of 8 values replaced by imm; values are processed 7 down to 0."""
    for role, operand in (("data", data), ("vals", vals), ("dst", dst)):
        rules.tile(machine, role, operand)
    _eight("vals", vals, data.shape[0])
    rules.same_layout("data", data, "dst", dst)
    outputs = [dst]
    if dst_idx is not None:
        rules.tile(machine, "dst_idx", dst_idx)
        _eight("dst_idx", dst_idx, data.shape[0])
        rules.one_of(machine, "dst_idx", dst_idx, ("uint16", "uint32"))
        outputs.append(dst_idx)
    values, wanted = _searched(machine, "data", data).copy(), rules.rows_of(machine, "vals", vals)
    issue(machine, "vector", outputs, (data, vals))
    sentinel = 2**32 - 1 if dst_idx is None else int(np.iinfo(dst_idx.numpy_type).max)
    found = np.full(wanted.shape, sentinel, np.int64)
    original = values.copy()
    taken = np.zeros(values.shape, bool)
    rows = np.arange(values.shape[0])
    for slot in range(7, -1, -1):
        hits = (original == wanted[:, slot : slot + 1]) & ~taken
        place, hit = hits.argmax(axis=1), hits.any(axis=1)
        taken[rows[hit], place[hit]] = True
        values[rows[hit], place[hit]] = imm
        found[rows[hit], slot] = place[hit]
    write(machine, dst, values)
    if dst_idx is not None:
        write(machine, dst_idx, found, "dst_idx")


@instruction
def nc_n_gather(machine: Machine, dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> None:
    """dst[p, i] = data[p, indices[p, i]] of the flattened free elements."""
    for role, operand in (("data", data), ("indices", indices), ("dst", dst)):
        rules.tile(machine, role, operand, (rules.SBUF,))
    rules.same_layout("indices", indices, "dst", dst)
    require(data.shape[0] == dst.shape[0], f"data has {data.shape[0]} partitions, dst {dst.shape[0]}")
    rules.one_of(machine, "indices", indices, ("uint32",))
    require(dst.dtype == data.dtype, f"dst is {dst.dtype}, data {data.dtype}: they must be equal")
    index = read(machine, indices, "indices").reshape(dst.shape[0], -1).astype(np.int64)
    require(bool((index < data.free_elements).all()), f"index {index.max()} of {data.free_elements} elements")
    issue(machine, "gpsimd", (dst,), (data, indices))
    values = read(machine, data, "data").reshape(data.shape[0], -1)
    write(machine, dst, np.take_along_axis(values, index, axis=1))


@instruction
def local_gather(
    machine: Machine,
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> None:
    """Each 16 partitions gather runs of their free elements by the 16 partitions' own list of indexes."""
    for role, operand in (("src_buffer", src_buffer), ("index", index), ("dst", dst)):
        rules.tile(machine, role, operand, (rules.SBUF,))
    rows = src_buffer.shape[0]
    require(
        rows == index.shape[0] and rows % 16 == 0,
        f"src_buffer has {rows} partitions, index {index.shape[0]}: they must be equal and a multiple of 16",
    )
    rules.one_of(machine, "index", index, ("uint16",))
    require(dst.dtype == src_buffer.dtype, f"dst is {dst.dtype}, src_buffer {src_buffer.dtype}: they must be equal")
    require(num_elem_per_idx in (1, 2, 4, 8, 16, 32), f"num_elem_per_idx is {num_elem_per_idx}: 1, 2, 4, 8, 16 or 32")
    count = index.size // (rows // 16) if num_valid_indices is None else num_valid_indices
    require(
        count <= index.size // (rows // 16), f"num_valid_indices is {count}: a core has {index.size // (rows // 16)}"
    )
    machine.limit(count <= 4096, f"{count} indexes per core: at most 4096")
    require(
        dst.shape[0] == rows and dst.free_elements == count * num_elem_per_idx,
        f"dst has {dst.free_elements} elements per partition: {count * num_elem_per_idx} are gathered",
    )
    lists = read(machine, index, "index").reshape(rows, -1).astype(np.int64)
    issue(machine, "gpsimd", (dst,), (src_buffer, index), indices=count, run=num_elem_per_idx)
    values = read(machine, src_buffer, "src_buffer").reshape(rows, -1)
    result = np.empty((rows, count * num_elem_per_idx), values.dtype)
    for core in range(rows // 16):
        part = slice(core * 16, core * 16 + 16)
        starts = lists[part].T.reshape(-1)[:count]
        places = (starts[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        require(bool((places < values.shape[1]).all()), f"index {places.max()} of {values.shape[1]} elements")
        result[part] = values[part][:, places]
    write(machine, dst, result)


@instruction
def nonzero_with_count(
    machine: Machine,
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: int = 0,
    padding_val: int = -1,
    name: str | None = None,
) -> None:
    """Partitions 0, 16, ...: indexes of the elements that are not 0, padding, and in the last element their count."""
    rules.since(machine, nc_version.gen3, "nonzero_with_count")
    rules.tile(machine, "src", src, (rules.SBUF,))
    rules.tile(machine, "dst", dst, (rules.SBUF,))
    rules.one_of(machine, "src", src, ("float32", "int32"))
    rules.one_of(machine, "dst", dst, ("int32",))
    require(dst.shape[0] == src.shape[0], f"dst has {dst.shape[0]} partitions, src {src.shape[0]}")
    require(
        dst.free_elements == src.free_elements + 1,
        f"dst has {dst.free_elements} elements per partition: one more than src's {src.free_elements}",
    )
    issue(machine, "gpsimd", (dst,), (src,))
    for row in range(0, src.shape[0], 16):
        values = read(machine, src[row : row + 1], "src").reshape(-1)
        found = np.flatnonzero(values) + index_offset
        line = np.full(dst.free_elements, padding_val, np.int64)
        line[: found.size] = found
        line[-1] = found.size
        write(machine, dst[row : row + 1], line)


@instruction
def sequence_bounds(machine: Machine, dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> None:
    """Start and end of each element's segment, (1, 2, n) of one partition of segment ids; 0 is padding: (n, -1)."""
    rules.tile(machine, "segment_ids", segment_ids, (rules.SBUF,))
    rules.tile(machine, "dst", dst, (rules.SBUF,))
    for role, operand in (("segment_ids", segment_ids), ("dst", dst)):
        rules.one_of(machine, role, operand, ("float32", "int32"))
        require(operand.shape[0] == 1, f"{role} has {operand.shape[0]} partitions: it must have one")
    ids = rules.rows_of(machine, "segment_ids", segment_ids).reshape(-1)
    require(dst.size == 2 * ids.size, f"dst has {dst.size} elements: it must have {2 * ids.size}")
    issue(machine, "gpsimd", (dst,), (segment_ids,))
    edges = np.flatnonzero(np.diff(ids)) + 1
    starts, ends = np.concatenate([[0], edges]), np.concatenate([edges, [ids.size]])
    part = np.searchsorted(starts, np.arange(ids.size), side="right") - 1
    bounds = np.stack([np.where(ids == 0, ids.size, starts[part]), np.where(ids == 0, -1, ends[part])])
    write(machine, dst, bounds.astype(np.float32))
