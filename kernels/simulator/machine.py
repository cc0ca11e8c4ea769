"""One simulated NeuronCore: its rules, its clock, its registers and what it executed."""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_neuron.kernels.simulator.dtypes import DType, stored
from vllm_neuron.kernels.simulator.errors import Broken, kernel_line
from vllm_neuron.kernels.simulator.storage import Lifetime, MemoryRegion, Storage
from vllm_neuron.kernels.simulator.targets import Target

if TYPE_CHECKING:
    from vllm_neuron.kernels.simulator.team import Team
    from vllm_neuron.kernels.simulator.trace import Instruction


@dataclass
class Machine:
    """The state of one core while it runs a kernel.

    Attributes:
        target: whose limits hold.
        strict: every documented rule is enforced; otherwise only those without which a result would be meaningless,
            and the others are counted in `notes`.
        precise: float types keep their own precision in memory (NKI_PRECISE_FP).
        rank: of this core among those that run the kernel.
        team: the cores that run it.
        trace: what was executed, for the cost model; None when nobody asked.
        values: instructions compute; otherwise they are checked and traced only.
        clock: instructions executed so far.
        notes: broken rules that compatible mode let pass, with how often.
        lifetimes: of all allocations.
    """

    target: Target
    strict: bool
    precise: bool
    rank: int
    team: "Team"
    trace: "list[Instruction] | None" = None
    values: bool = True
    clock: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    lifetimes: list[Lifetime] = field(default_factory=list)
    scalar_registers: np.ndarray = field(default_factory=lambda: np.zeros(128, np.float32))
    vector_registers: np.ndarray = field(default_factory=lambda: np.full(128, np.nan, np.float32))
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    instruction: str = "kernel"
    shared_count: int = 0
    pinned: list[Storage] = field(default_factory=list)

    def limit(self, holds: bool, rule: str) -> None:
        """A rule of strict mode; compatible mode counts it.

        Raises:
            Broken: it does not hold, in strict mode.
        """
        if holds:
            return
        if self.strict:
            raise Broken(rule)
        self.notes[f"{self.instruction}: {rule}"] += 1

    def allocate(
        self,
        region: MemoryRegion,
        shape: tuple[int, ...],
        dtype: DType,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> Storage:
        """New memory for a tensor, filled with what uninitialised memory reads as.

        Raises:
            Broken: no memory of the region can have this shape.
        """
        partitions = shape[0] if region.on_chip else 1
        elements = int(np.prod(shape[1:] if region.on_chip else shape, dtype=np.int64))
        if region.on_chip:
            self._check_on_chip(region, partitions, elements * dtype.size, address)
        label = f"{name or 'tensor'} {dtype.name} {shape}"
        lifetime = Lifetime(region, elements * dtype.size, label, kernel_line())
        self.lifetimes.append(lifetime)
        row_bytes = elements * stored(dtype, self.precise).itemsize
        storage = Storage(region, partitions, row_bytes, lifetime, self.precise, address=address)
        if self.values:
            storage.poison(dtype)
        if address is not None and self.strict:
            self.pinned = [other for other in self.pinned if other.lifetime is not lifetime]
            self.pinned.append(storage)
        return storage

    def _check_on_chip(self, region: MemoryRegion, partitions: int, size: int, address: tuple[int, int] | None) -> None:
        start, byte = address or (0, 0)
        limit = self.target.partitions
        if partitions < 1 or start + partitions > limit:
            raise Broken(f"{partitions} partitions from partition {start}: {region.value} has {limit}")
        if region is MemoryRegion.sbuf:
            self.limit(
                byte + size <= self.target.sbuf_bytes,
                f"{byte + size} bytes per partition of sbuf: a kernel may use {self.target.sbuf_bytes}",
            )
            return
        bank, capacity = self.target.psum_bank_bytes, self.target.psum_banks * self.target.psum_bank_bytes
        self.limit(byte + size <= capacity, f"{byte + size} bytes per partition of psum: it has {capacity} (8 banks)")
        self.limit(byte % bank == 0, f"psum address {byte} is no multiple of a bank ({bank} bytes)")


_state = threading.local()


def enter(machine: Machine | None) -> None:
    """Make `machine` the one that this thread's kernel runs on; None ends it."""
    _state.machine = machine


def running() -> Machine | None:
    """The machine that this thread's kernel runs on, if one runs."""
    return getattr(_state, "machine", None)


def current() -> Machine:
    """The machine that this thread's kernel runs on.

    Raises:
        RuntimeError: no kernel runs.
    """
    machine = running()
    if machine is None:
        raise RuntimeError("NKI functions work inside a kernel only: run it with nki.simulate(kernel)(*arrays)")
    return machine


def describe(values: dict[str, Any]) -> str:
    """The tensors among an instruction's arguments, in words."""
    from vllm_neuron.kernels.simulator.tensor import NkiTensor

    flat = [
        (name, v) for name, value in values.items() for v in (value if isinstance(value, list | tuple) else [value])
    ]
    return ", ".join(f"{name}={value!r}" for name, value in flat if isinstance(value, NkiTensor))
