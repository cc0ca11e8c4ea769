"""What a run of a kernel would take on a device: an estimate from documented formulas, never a measurement."""

from dataclasses import dataclass

from vllm_neuron.kernels.simulator.run import Run
from vllm_neuron.kernels.simulator.schedule import Placed, schedule
from vllm_neuron.kernels.simulator.targets import Target

LABEL = "estimate from documented formulas, not a measurement"
PEAK_FLOPS_PER_CYCLE = 2 * 128 * 128
"""Of the Tensor Engine with 16-bit operands."""


@dataclass(frozen=True)
class Report:
    """An estimate of one run.

    Attributes:
        target: the core.
        makespan_us: from the first instruction to the last, of the slowest core.
        busy: share of the makespan that each engine works, "dma" being all 16 DMA engines together; slowest core.
        flops: of matrix products, all cores.
        hbm_bytes: read and written, all cores.
        instructions: executed, all cores.
        cores: that ran it.
        timelines: the placed instructions of each core.
    """

    target: Target
    makespan_us: float
    busy: dict[str, float]
    flops: int
    hbm_bytes: int
    instructions: int
    cores: int
    timelines: tuple[tuple[Placed, ...], ...]

    @property
    def bound(self) -> str:
        """The engine that works most of the time."""
        return max(self.busy, key=lambda engine: self.busy[engine], default="none")

    @property
    def tflops(self) -> float:
        """Matrix products, in 10^12 operations per second."""
        return self.flops / self.makespan_us / 1e6 if self.makespan_us else 0.0

    @property
    def utilization(self) -> float:
        """Share of the Tensor Engines' peak with 16-bit operands (MFU)."""
        return self.tflops / (PEAK_FLOPS_PER_CYCLE * self.target.clock_ghz["tensor"] / 1e3 * self.cores)

    @property
    def hbm_gbps(self) -> float:
        """Traffic with HBM, GB/s."""
        return self.hbm_bytes / self.makespan_us / 1e3 if self.makespan_us else 0.0

    def __str__(self) -> str:
        busy = ", ".join(f"{engine} {share:.0%}" for engine, share in sorted(self.busy.items(), key=lambda e: -e[1]))
        return (
            f"{self.target.name} x {self.cores}, {LABEL}:\n"
            f"  {self.makespan_us:.1f} us for {self.instructions} instructions, bound by {self.bound}; busy: {busy}\n"
            f"  {self.tflops:.1f} TFLOP/s ({self.utilization:.1%} of the peak), {self.hbm_gbps:.0f} GB/s of HBM"
        )


def estimate(run: Run) -> Report:
    """What a run would take.

    Args:
        run: of Simulated.run(..., trace=True).

    Raises:
        ValueError: it was not traced.
    """
    if not run.traces:
        raise ValueError("this run was not traced: run it with trace=True")
    timelines = tuple(tuple(schedule(trace, run.target)) for trace in run.traces)
    slowest = max(timelines, key=_makespan)
    everything = [placed for timeline in timelines for placed in timeline]
    return Report(
        run.target,
        _makespan(slowest) / 1e3,
        _busy(slowest, run.target),
        sum(placed.cost.flops for placed in everything),
        sum(placed.cost.hbm_bytes for placed in everything),
        len(everything),
        len(timelines),
        timelines,
    )


def _makespan(timeline: tuple[Placed, ...]) -> float:
    return max((placed.end for placed in timeline), default=0.0)


def _busy(timeline: tuple[Placed, ...], target: Target) -> dict[str, float]:
    total = _makespan(timeline) or 1.0
    busy: dict[str, float] = {}
    for placed in timeline:
        if placed.engine == "dma":
            share = placed.cost.ns * placed.cost.queues[1] / target.dma_engines
            if placed.cost.issue is not None:
                generator, length = placed.cost.issue
                busy[generator] = busy.get(generator, 0.0) + length
        else:
            share = placed.cost.ns
        busy[placed.engine] = busy.get(placed.engine, 0.0) + share
    return {engine: time / total for engine, time in busy.items()}
