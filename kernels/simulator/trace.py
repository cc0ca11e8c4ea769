"""What a core executed, in program order: the input of the cost model."""

from dataclasses import dataclass, field
from typing import Any

from vllm_neuron.kernels.simulator import views
from vllm_neuron.kernels.simulator.dtypes import DType
from vllm_neuron.kernels.simulator.storage import MemoryRegion
from vllm_neuron.kernels.simulator.tensor import NkiTensor


@dataclass(frozen=True)
class Access:
    """An operand of an executed instruction.

    Attributes:
        storage: identity of the allocation.
        region: where it lies.
        dtype: its type.
        shape: as the instruction saw it.
        low, high: first and last byte touched within a partition (HBM: within the allocation).
        partitions: first and last partition touched; (0, 0) in HBM.
        run: contiguous bytes of the innermost dimension, which is what one DMA descriptor can move.
        allocated: bytes of the allocation; per partition on chip.
    """

    storage: int
    region: MemoryRegion
    dtype: DType
    shape: tuple[int, ...]
    low: int
    high: int
    partitions: tuple[int, int]
    run: int
    allocated: int

    @property
    def elements(self) -> int:
        """Elements per partition."""
        count = 1
        for size in self.shape[1:]:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Bytes in all partitions."""
        return self.elements * self.shape[0] * self.dtype.size

    @property
    def contiguous(self) -> bool:
        """Whether a partition's elements lie in one piece."""
        return self.run >= self.elements * self.dtype.size


def access(tensor: NkiTensor) -> Access:
    """The operand that a tensor is. An address known at run time only counts as anywhere in the allocation."""
    size, skip = tensor.data_type.size, int(tensor.on_chip)
    dims = views.merged(tensor.shape[skip:], tensor.strides[skip:])
    run = dims[-1][1] * size if dims and dims[-1][0] == 1 else size
    extent = sum(stride * (count - 1) for stride, count in dims)
    if tensor.indirection is not None:
        low, high = 0, tensor.storage.data.nbytes
        if tensor.indirection.rows and tensor.ndim > 1:
            inner = views.merged(tensor.shape[1:], tensor.strides[1:])
            run = inner[-1][1] * size if inner and inner[-1][0] == 1 else size
    else:
        first = tensor.offset % tensor.row_elements if tensor.on_chip else tensor.offset
        low, high = first * size, (first + extent + 1) * size - 1
    start = tensor.start_partition if tensor.on_chip else 0
    last = start + tensor.shape[0] - 1 if tensor.on_chip else 0
    shape = tensor.shape if tensor.on_chip or tensor.ndim > 1 else (1, *tensor.shape)
    lifetime = tensor.storage.lifetime
    return Access(id(lifetime), tensor.buffer, tensor.data_type, shape, low, high, (start, last), run, lifetime.bytes)


@dataclass(frozen=True)
class Instruction:
    """An executed instruction.

    Attributes:
        name: e.g. "nc_matmul".
        engine: "tensor", "vector", "scalar", "gpsimd", "sync" or "dma".
        writes, reads: its operands.
        line: "file:line" of the kernel.
        attributes: what its cost depends on besides.
    """

    name: str
    engine: str
    writes: tuple[Access, ...]
    reads: tuple[Access, ...]
    line: str
    attributes: dict[str, Any] = field(default_factory=dict)
