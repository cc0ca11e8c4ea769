"""How long an instruction occupies its engine: the formulas that AWS documents, in cycles of the engine's clock.

Sources: the cost notes of the instructions in the NKI documentation of release 2.26 (MIN_II and the per-instruction
formulas), the Trainium 2 and 3 architecture guides (clocks, widths, performance modes, DMA engines), and the guide on
DMA bandwidth. What they leave open is in OPEN. Two values are calibrated on published measurements of a matrix product
of 2048 x 2048 x 2048: DMA_LATENCY and DMA_DESCRIPTOR.

N below is the number of elements per partition.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from vllm_neuron.kernels.simulator.storage import MemoryRegion
from vllm_neuron.kernels.simulator.targets import Target, nc_version
from vllm_neuron.kernels.simulator.trace import Access, Instruction

MIN_II = 64
"""Cycles that any instruction of an engine takes at least."""
MIN_II_DYNAMIC = 600
"""The same with an address that is known at run time only."""
ACCESS_LATENCY = 60
"""Cycles until a result can be read: SBUF and PSUM access latency."""
LOAD_STATIONARY = 32
"""Cycles to load 128 rows of weights, four a cycle; paid when the weights change."""
SYNC = 60.0
"""ns from the end of an instruction to one on another engine that waits for it (a semaphore)."""
DMA_LATENCY = 600.0
"""ns from the trigger of a DMA to its first byte. Calibrated; the guides say 1300, with the semaphores included."""
DMA_DESCRIPTOR = 12.0
"""ns per descriptor, i.e. per contiguous run of bytes. Calibrated; the guide says that 2 KiB runs approach the peak."""
DGE_ISSUE = 600.0
"""ns of the engine that generates descriptors at run time, per DMA."""
GPSIMD_START = 150
"""Cycles of a GpSimd instruction before its first element."""
TRANSPOSE_RATE = {MemoryRegion.sbuf: 0.5}
"""Share of the DMA rate that a transpose reaches, by where its source lies; 0.9 from HBM."""
OPEN = (
    "gathers and partition reductions of the GpSimd engine, for which no formula is documented: 150 + N cycles",
    "element-wise operations of the GpSimd engine: 150 + 2 N cycles",
    "descriptors of a gather by DMA: 600 ns of the GpSimd engine, as the hardware generator takes",
)
"""What no document says, and what is assumed."""


@dataclass(frozen=True)
class Cost:
    """What an instruction takes.

    Attributes:
        ns: for which its engine is occupied; of a DMA for which each of `queues` is.
        latency: ns more until its results can be used.
        queues: DMA engines that work on it, as (first, number); (0, 0) if none.
        issue: (engine, ns) that generates its descriptors, or None.
        flops: floating point operations of a matrix product; transposes do not count.
        hbm_bytes: read from and written to HBM.
    """

    ns: float
    latency: float
    queues: tuple[int, int] = (0, 0)
    issue: tuple[str, float] | None = None
    flops: int = 0
    hbm_bytes: int = 0


def _halfwords(*operands: Access) -> bool:
    return all(operand.dtype.size == 2 for operand in operands)


def _in_sbuf(*operands: Access) -> bool:
    return all(operand.region is MemoryRegion.sbuf for operand in operands)


def _tiles(instruction: Instruction) -> list[Access]:
    """Operands that are no columns of scalars."""
    n = instruction.writes[0].elements if instruction.writes else 1
    return [operand for operand in (*instruction.writes[:1], *instruction.reads) if operand.elements > 1 or n == 1]


def _copy(instruction: Instruction, n: int) -> float:
    """Four elements a cycle if they are of 16 bits, contiguous and in SBUF; two if strided or with one side in PSUM."""
    tiles = _tiles(instruction)
    if not _halfwords(*tiles):
        return n
    fast = _in_sbuf(*tiles) + all(operand.contiguous for operand in tiles)
    return n / (1, 2, 4)[fast]


def _pairwise(instruction: Instruction, n: int) -> float:
    """Two streams out of SBUF share its port unless they are of 16 bits."""
    tiles = _tiles(instruction)
    return n if not _in_sbuf(*tiles[1:]) or _halfwords(*tiles) else 2 * n


def _reduce(instruction: Instruction, n: int) -> float:
    fast = instruction.attributes.get("op") in ("add", "maximum") and _halfwords(*instruction.reads)
    return n / 2 if fast else n


def _memset(instruction: Instruction, n: int) -> float:
    return n / 2 if instruction.attributes.get("zero") and _halfwords(*instruction.writes) else n


_VECTOR: dict[str, Callable[[Instruction, int], float]] = {
    "tensor_copy": _copy,
    "tensor_scalar": _copy,
    "tensor_tensor": _pairwise,
    "scalar_tensor_tensor": _pairwise,
    "tensor_copy_predicated": _pairwise,
    "select_reduce": _pairwise,
    "tensor_reduce": _reduce,
    "memset": _memset,
    "tensor_tensor_scan": lambda i, n: 2 * n,
    "reciprocal": lambda i, n: 8 * n,
    "bn_aggr": lambda i, n: 13 * n / 3,
    "tensor_scalar_reduce": lambda i, n: n + MIN_II,
}
"""Cycles by N; instructions of the Vector Engine that are not listed take N."""


def _local_gather(instruction: Instruction) -> float:
    run, count = instruction.attributes["run"], instruction.attributes["indices"]
    size = instruction.reads[0].dtype.size
    each = ((28 + 4 * run) / (4 * run)) / min(4 / size, run)
    return GPSIMD_START + count * run * each


def cycles(instruction: Instruction, target: Target) -> float:
    """Cycles that an instruction occupies its engine, DMA excepted."""
    operands = [*instruction.writes, *instruction.reads]
    n = max((operand.elements for operand in operands), default=1)
    if instruction.engine == "tensor":
        return _tensor(instruction)
    if instruction.engine == "scalar":
        fast = target.version >= nc_version.gen4 and _halfwords(*_tiles(instruction))
        extra = MIN_II if instruction.attributes.get("reduces") else 0
        return max(MIN_II, n / 2 if fast else n) + extra
    if instruction.engine == "gpsimd":
        if instruction.name == "local_gather":
            return _local_gather(instruction)
        if instruction.name == "tensor_scalar":
            return max(MIN_II, 4 * n)
        return GPSIMD_START + (2 * n if instruction.name == "tensor_tensor" else n)
    if instruction.engine == "vector":
        return max(MIN_II, _VECTOR.get(instruction.name, lambda i, n: n)(instruction, n))
    return MIN_II


def _tensor(instruction: Instruction) -> float:
    """max(min(64, rows), columns) per pass; four passes for float32, two where a transpose moves it."""
    what = instruction.attributes
    single = any(operand.dtype.name in ("float32", "tfloat32") for operand in instruction.reads[:2])
    if instruction.name == "nc_transpose":
        return max(what["depth"], min(MIN_II, what["rows"])) * (2 if single else 1)
    once = max(min(MIN_II, what["rows"]), what["columns"])
    return once * ((2 if what["transpose"] else 4) if single else 1)


def _dma(instruction: Instruction, target: Target) -> Cost:
    sides = [*instruction.writes, *instruction.reads[: max(1, len(instruction.reads))]]
    moved = max(operand.bytes for operand in sides)
    size = instruction.writes[0].elements * instruction.writes[0].shape[0]
    # Indexes of a gather are operands too, but not what moves.
    run = max(1, min(operand.run for operand in sides if operand.elements * operand.shape[0] == size))
    on_chip = [operand for operand in sides if operand.region.on_chip]
    if on_chip:
        rows = max(on_chip, key=lambda operand: operand.shape[0])
        first, count = rows.partitions[0] // 8, max(1, math.ceil(rows.shape[0] / 8))
    else:
        first, count = 0, target.dma_engines
    rate = min(target.dma_engine_gbps, target.hbm_gbps / target.dma_engines)
    if instruction.attributes.get("transposes"):
        source = instruction.reads[0].region
        rate, run = rate * TRANSPOSE_RATE.get(source, 0.9), max(run, 2048)
    each = moved / count
    ns = each / rate + math.ceil(each / run) * DMA_DESCRIPTOR
    mode = instruction.attributes.get("dge")
    issue = None
    if instruction.attributes.get("gathers"):
        issue = ("gpsimd", DGE_ISSUE)
    elif mode == "hwdge":
        issue = ("sync", DGE_ISSUE)
    hbm = sum(operand.bytes for operand in sides if not operand.region.on_chip)
    return Cost(ns, DMA_LATENCY, (first, min(count, target.dma_engines)), issue, hbm_bytes=hbm)


def cost(instruction: Instruction, target: Target, same_weights: bool = False) -> Cost:
    """What an instruction takes on a target.

    Args:
        instruction: as executed.
        target: the core.
        same_weights: a matmul whose stationary operand is that of the one before it.
    """
    if instruction.engine == "dma":
        return _dma(instruction, target)
    clock = target.clock_ghz.get(instruction.engine, target.clock_ghz["sync"])
    taken = cycles(instruction, target)
    flops = 0
    if instruction.engine == "tensor":
        taken += 0 if same_weights else LOAD_STATIONARY
        what = instruction.attributes
        if instruction.name == "nc_matmul" and not what["transpose"]:
            flops = 2 * what["depth"] * what["rows"] * what["columns"] * (2 if what["double_row"] else 1)
        if instruction.name == "nc_matmul_mx":
            flops = 2 * 4 * what["depth"] * what["rows"] * what["columns"]
    return Cost(taken / clock, ACCESS_LATENCY / clock, flops=flops)
