"""When each executed instruction would run: engines in order, DMA engines side by side, and what waits for what."""

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_neuron.kernels.simulator.cost import SYNC, Cost, cost
from vllm_neuron.kernels.simulator.storage import MemoryRegion
from vllm_neuron.kernels.simulator.targets import Target
from vllm_neuron.kernels.simulator.trace import Access, Instruction


@dataclass(frozen=True)
class Placed:
    """An instruction on the time line.

    Attributes:
        instruction: what.
        engine: "tensor", "vector", "scalar", "gpsimd", "sync" or "dma".
        start, end: ns, between which it occupies its engine; of a DMA from its first byte to its last.
        cost: what it takes.
    """

    instruction: Instruction
    engine: str
    start: float
    end: float
    cost: Cost


@dataclass
class _Use:
    """A past access of an allocation."""

    access: Access
    engine: str
    busy_until: float
    ready: float

    def touches(self, other: Access) -> bool:
        one, two = self.access, other
        return (
            one.low <= two.high
            and two.low <= one.high
            and one.partitions[0] <= two.partitions[1]
            and two.partitions[0] <= one.partitions[1]
        )

    def covered_by(self, other: Access) -> bool:
        one = self.access
        return (
            other.low <= one.low
            and one.high <= other.high
            and other.partitions[0] <= one.partitions[0]
            and one.partitions[1] <= other.partitions[1]
        )


@dataclass
class _Memory:
    """Room in SBUF or PSUM: an allocation waits until earlier ones are done with theirs."""

    capacity: int
    used: int = 0
    done: list[tuple[float, int]] = field(default_factory=list)

    def take(self, size: int) -> float:
        """The time from which there is room."""
        earliest = 0.0
        self.used += size
        while self.used > self.capacity and self.done:
            when, freed = self.done.pop(0)
            earliest = max(earliest, when)
            self.used -= freed
        return earliest

    def release(self, when: float, size: int) -> None:
        insort(self.done, (when, size))


@dataclass
class _Queue:
    """A DMA engine, with the times at which it is busy. A transfer is cut at its descriptors and fills the gaps that
    others leave, so that one that waits does not block those behind it.
    """

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def place(self, earliest: float, length: float) -> tuple[float, float]:
        """When a transfer of `length` ns that can begin at `earliest` begins and ends."""
        position = bisect_right(self.ends, earliest)
        begin, cursor, left = None, earliest, length
        while True:
            limit = self.starts[position] if position < len(self.starts) else math.inf
            if limit > cursor:
                begin = cursor if begin is None else begin
                if limit - cursor >= left:
                    break
                left -= limit - cursor
            cursor = self.ends[position]
            position += 1
        end = cursor + left
        # From its begin to its end the engine is busy without a gap now.
        first, last = bisect_left(self.ends, begin), bisect_right(self.starts, end)
        whole = (min([begin, *self.starts[first:last]]), max([end, *self.ends[first:last]]))
        self.starts[first:last], self.ends[first:last] = [whole[0]], [whole[1]]
        return begin, end


def schedule(trace: Sequence[Instruction], target: Target) -> list[Placed]:
    """Place the instructions of one core on a time line.

    Every engine runs its instructions in program order. An instruction waits for what it reads to be written, for what
    it overwrites to be read, and for room in SBUF and PSUM (allocations that are done make room for later ones, as a
    compiler that rotates buffers would have it); a semaphore between engines takes SYNC.
    """
    spans = _spans(trace)
    memories = {
        MemoryRegion.sbuf: _Memory(target.sbuf_bytes),
        MemoryRegion.psum: _Memory(target.psum_banks * target.psum_bank_bytes),
    }
    free: dict[str, float] = defaultdict(float)
    queues = [_Queue() for _ in range(target.dma_engines)]
    writes: dict[int, list[_Use]] = defaultdict(list)
    reads: dict[int, list[_Use]] = defaultdict(list)
    last_use: dict[int, float] = defaultdict(float)
    placed: list[Placed] = []
    weights: Access | None = None

    for number, instruction in enumerate(trace):
        engine = instruction.engine
        operands = (*instruction.writes, *instruction.reads)
        earliest = 0.0
        for operand in operands:
            if spans[operand.storage][0] == number and operand.region in memories:
                spans[operand.storage] = (-1, spans[operand.storage][1])
                earliest = max(earliest, memories[operand.region].take(operand.allocated))
        for operand in instruction.reads:
            for use in writes[operand.storage]:
                if use.touches(operand):
                    earliest = max(earliest, _after(use, engine, use.ready, instruction))
        for operand in instruction.writes:
            for use in writes[operand.storage]:
                if use.touches(operand):
                    earliest = max(earliest, _after(use, engine, use.ready, instruction))
            for use in reads[operand.storage]:
                if (use.engine != engine or engine == "dma") and use.touches(operand):
                    earliest = max(earliest, use.busy_until + SYNC)
        stationary = instruction.reads[0] if engine == "tensor" and instruction.reads else None
        taken = cost(instruction, target, stationary is not None and stationary == weights)
        weights = stationary or weights
        start, end = _place(taken, engine, earliest, free, queues)
        ready = end + (0.0 if engine == "dma" else taken.latency)
        placed.append(Placed(instruction, engine, start, end, taken))
        for operand in instruction.reads:
            reads[operand.storage].append(_Use(operand, engine, end, ready))
        for operand in instruction.writes:
            writes[operand.storage] = [use for use in writes[operand.storage] if not use.covered_by(operand)]
            reads[operand.storage] = [use for use in reads[operand.storage] if not use.covered_by(operand)]
            writes[operand.storage].append(_Use(operand, engine, end, ready))
        for operand in operands:
            last_use[operand.storage] = max(last_use[operand.storage], ready)
        for operand in {operand.storage: operand for operand in operands}.values():
            if spans[operand.storage][1] == number and operand.region in memories:
                memories[operand.region].release(last_use[operand.storage], operand.allocated)
    return placed


def _spans(trace: Sequence[Instruction]) -> dict[int, tuple[int, int]]:
    """First and last instruction that touches each allocation."""
    spans: dict[int, tuple[int, int]] = {}
    for number, instruction in enumerate(trace):
        for operand in (*instruction.writes, *instruction.reads):
            spans[operand.storage] = (spans.get(operand.storage, (number, 0))[0], number)
    return spans


def _after(use: _Use, engine: str, ready: float, instruction: Instruction) -> float:
    """When an instruction may start that needs what `use` wrote."""
    if use.engine == engine == "tensor" and instruction.name.startswith("nc_matmul"):
        return 0.0  # products accumulate in PSUM back to back
    return ready + (0.0 if use.engine == engine and engine != "dma" else SYNC)


def _place(
    taken: Cost, engine: str, earliest: float, free: dict[str, float], queues: list[_Queue]
) -> tuple[float, float]:
    if engine != "dma":
        start = max(earliest, free[engine])
        free[engine] = start + taken.ns
        return start, start + taken.ns
    if taken.issue is not None:
        generator, length = taken.issue
        begin = max(earliest, free[generator])
        free[generator] = earliest = begin + length
    first, count = taken.queues
    spans = [queues[(first + i) % len(queues)].place(earliest + taken.latency, taken.ns) for i in range(count)]
    return min(start for start, _ in spans), max(end for _, end in spans)
