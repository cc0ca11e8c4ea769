"""Documented limits of a NeuronCore, by generation."""

from dataclasses import dataclass
from enum import IntEnum


class nc_version(IntEnum):
    """Generation of a NeuronCore, as `nki.isa.nc_version`. Members are ordered by age."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


@dataclass(frozen=True)
class Target:
    """Sizes and rates of one NeuronCore.

    Attributes:
        name: as in NEURON_PLATFORM_TARGET_OVERRIDE.
        version: its generation.
        sbuf_bytes: bytes of SBUF per partition that a kernel may use (what the hardware has, less the reserved part).
        matmul_moving: free size of the moving operand at most, for a float32 destination.
        matmul_moving_bf16: the same for a bfloat16 destination; 0 where matmul cannot write bfloat16.
        clock_ghz: clock of each engine, by name of `nki.isa.engine`.
        dma_engine_gbps: bytes per ns that one of the 16 DMA engines achieves.
        hbm_gbps: share of the chip's HBM bandwidth of one core, GB/s.
    """

    name: str
    version: nc_version
    sbuf_bytes: int
    matmul_moving: int
    matmul_moving_bf16: int
    clock_ghz: dict[str, float]
    dma_engine_gbps: float
    hbm_gbps: float

    partitions = 128
    psum_banks = 8
    psum_bank_bytes = 2048
    dma_engines = 16


TRN2 = Target(
    name="trn2",
    version=nc_version.gen3,
    sbuf_bytes=212984,
    matmul_moving=512,
    matmul_moving_bf16=0,
    clock_ghz={"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2, "sync": 1.2},
    dma_engine_gbps=23.0,
    hbm_gbps=362.0,
)
TRN3 = Target(
    name="trn3",
    version=nc_version.gen4,
    sbuf_bytes=245752,
    matmul_moving=4096,
    matmul_moving_bf16=8192,
    clock_ghz={"tensor": 2.4, "vector": 1.2, "scalar": 1.2, "gpsimd": 1.2, "sync": 1.2},
    dma_engine_gbps=33.0,
    hbm_gbps=612.0,
)
TARGETS = {target.name: target for target in (TRN2, TRN3)}
