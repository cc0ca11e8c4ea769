"""Simulated memories: what lies behind tensors, with what was written where and when it was used."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from vllm_neuron.kernels.simulator import dtypes


class MemoryRegion(Enum):
    """Where a tensor lies, as `nki.language.MemoryRegion`."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    def __init__(self, place: str) -> None:
        self.on_chip = place in ("sbuf", "psum")
        """Whether it is divided into partitions."""


@dataclass
class Lifetime:
    """When an allocation was used; it stays when the storage is gone.

    Attributes:
        region: where it lies.
        bytes: bytes per partition on chip, else all of them.
        label: name, type and shape, for messages.
        line: "file:line" of the allocation.
        first, last: indexes of the first and the last instruction that touched it; -1 if none did.
    """

    region: MemoryRegion
    bytes: int
    label: str
    line: str
    first: int = -1
    last: int = -1


class Cell:
    """States of bytes of PSUM, for accumulation groups."""

    EMPTY = 0
    OPEN = 1
    """Written by matmul; a further matmul may accumulate."""
    READ = 2
    """Written by matmul and read since: the group is over."""
    OTHER = 3
    """Written by another instruction."""


class Storage:
    """One allocation.

    Attributes:
        region: where it lies.
        partitions: partitions it covers; 1 in HBM.
        row_bytes: bytes per partition as simulated; all bytes in HBM.
        data: the bytes, partition after partition.
        written: 1 for every byte that was written; None when all were.
        cells: state of every byte (Cell), in PSUM only.
        address: (start partition, byte offset) that a kernel asked for, or None.
        precise: float types are stored in their own format, not in float32.
        lifetime: when it was used.
    """

    __slots__ = (
        "address", "cells", "data", "lifetime", "partitions", "precise", "region", "row_bytes", "written",
    )  # fmt: skip

    def __init__(
        self,
        region: MemoryRegion,
        partitions: int,
        row_bytes: int,
        lifetime: Lifetime,
        precise: bool,
        data: np.ndarray | None = None,
        address: tuple[int, int] | None = None,
    ) -> None:
        self.region, self.partitions, self.row_bytes = region, partitions, row_bytes
        self.data = np.empty(partitions * row_bytes, np.uint8) if data is None else data
        self.written = np.zeros(partitions * row_bytes, np.uint8) if data is None else None
        self.cells = np.zeros(partitions * row_bytes, np.uint8) if region is MemoryRegion.psum else None
        self.address, self.precise, self.lifetime = address, precise, lifetime

    def poison(self, dtype: dtypes.DType) -> None:
        """Fill with what uninitialised memory reads as: NaN in float types, 4 in integer types."""
        storage = dtypes.stored(dtype, self.precise)
        fill = 4 if dtype.kind != "float" else np.nan
        self.data.view(storage)[...] = np.asarray(fill).astype(storage)

    @property
    def start_partition(self) -> int:
        return self.address[0] if self.address else 0

    @property
    def start_byte(self) -> int:
        return self.address[1] if self.address else 0
