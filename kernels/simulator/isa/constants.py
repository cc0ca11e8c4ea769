"""The enumerations of `nki.isa`."""

from enum import Enum

from vllm_neuron.kernels.simulator.targets import nc_version

__all__ = ["dge_mode", "dma_engine", "engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd"]


class engine(Enum):
    """Engines of a NeuronCore."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    """What an instruction does with an engine's reduction registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who generates the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What happens to accesses out of bounds."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Performance mode of matmul."""

    none = "none"
    double_row = "double_row"


class dma_engine(Enum):
    """Who moves the data of sendrecv."""

    dma = 1
    gpsimd_dma = 2
