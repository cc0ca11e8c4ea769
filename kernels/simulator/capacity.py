"""How much SBUF and PSUM a kernel needs, by when its tensors are used."""

from collections.abc import Sequence

from vllm_neuron.kernels.simulator.errors import Violation
from vllm_neuron.kernels.simulator.storage import Lifetime, MemoryRegion
from vllm_neuron.kernels.simulator.targets import Target


def peak_of(lifetimes: Sequence[Lifetime]) -> tuple[int, list[Lifetime]]:
    """Bytes per partition that are in use at the same time, and by what.

    A tensor is in use from the first to the last instruction that touches it. Tensors of fewer than 128 partitions
    count like others: they are not packed side by side.
    """
    events = sorted(
        event
        for life in lifetimes
        if life.first >= 0
        for event in ((life.first, 1, life.bytes), (life.last + 1, 0, -life.bytes))
    )
    level, peak, when = 0, 0, 0
    for clock, _, change in events:
        level += change
        if level > peak:
            peak, when = level, clock
    return peak, [life for life in lifetimes if life.first >= 0 and life.first <= when <= life.last]


def check_capacity(lifetimes: Sequence[Lifetime], target: Target, strict: bool) -> dict[str, int]:
    """The peak of each memory in bytes per partition.

    Raises:
        Violation: it is more than the core has (strict).
    """
    limits = {MemoryRegion.sbuf: target.sbuf_bytes, MemoryRegion.psum: target.psum_banks * target.psum_bank_bytes}
    peaks = {}
    for region, limit in limits.items():
        peak, live = peak_of([life for life in lifetimes if life.region is region])
        peaks[region.value] = peak
        if strict and peak > limit:
            largest = sorted(live, key=lambda life: -life.bytes)[:8]
            rule = (
                f"{peak} bytes per partition of {region.value} are in use at the same time: {target.name} has {limit}"
            )
            sizes = "; ".join(f"{life.label} at {life.line}" for life in largest)
            raise Violation("kernel", rule, sizes, largest[0].line)
    return peaks
