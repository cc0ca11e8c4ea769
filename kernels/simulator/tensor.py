"""NkiTensor: a typed view of a storage, with the indexing rules of NKI."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, views
from vllm_neuron.kernels.simulator.errors import Broken, require
from vllm_neuron.kernels.simulator.machine import current, running
from vllm_neuron.kernels.simulator.registers import VirtualRegister
from vllm_neuron.kernels.simulator.storage import MemoryRegion, Storage
from vllm_neuron.kernels.simulator.views import View, ds

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@dataclass(frozen=True)
class Indirection:
    """An address that is known at run time only.

    Attributes:
        source: a register or a tensor of indexes; one index, or one per row of the view.
        stride: elements per index.
        extent: number of legal indexes.
        rows: the indexes belong to the view's rows (vector_offset); else one index moves the view (scalar_offset).
    """

    source: Any
    stride: int
    extent: int
    rows: bool


class NkiTensor:
    """A view of a storage.

    Attributes:
        storage: where the elements lie.
        dtype: name of the data type.
        data_type: the same as a DType.
        layout: which elements of the storage it shows.
        indirection: an address that is known at run time only, or None.
        name: for messages.
    """

    def __init__(
        self,
        storage: Storage,
        data_type: dtypes.DType,
        layout: View,
        indirection: Indirection | None = None,
        name: str = "",
    ) -> None:
        self.storage, self.data_type, self.layout, self.indirection, self.name = (
            storage, data_type, layout, indirection, name,
        )  # fmt: skip

    # What kernels ask a tensor for.

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.layout.strides

    @property
    def offset(self) -> int:
        return self.layout.offset

    @property
    def dtype(self) -> str:
        return self.data_type.name

    @property
    def buffer(self) -> MemoryRegion:
        return self.storage.region

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        return self.layout.size

    def __len__(self) -> int:
        return self.layout.shape[0]

    def __repr__(self) -> str:
        name = f"{self.name} " if self.name else ""
        return f"{name}{self.dtype} {self.shape} in {self.buffer.value}"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        machine = running()
        if machine is not None and machine.strict:
            raise TypeError(f"{self!r} has no value while the kernel is built: it cannot be used as a condition")
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.elements(), dtype=dtype)

    def is_contiguous(self) -> bool:
        """Whether it lies in one piece, row-major; on chip within each partition."""
        skip = int(self.on_chip)
        return views.contiguous(self.shape[skip:], self.strides[skip:])

    def is_indirect(self) -> bool:
        return self.indirection is not None

    def get_pattern(self) -> list[list[int]]:
        """The access pattern, [[stride, count], ...]."""
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    # Where it lies.

    @property
    def on_chip(self) -> bool:
        return self.storage.region.on_chip

    @property
    def numpy_type(self) -> np.dtype:
        return dtypes.stored(self.data_type, self.storage.precise)

    @property
    def row_elements(self) -> int:
        """Elements per partition of the whole storage, i.e. the stride between partitions."""
        return self.storage.row_bytes // self.numpy_type.itemsize

    @property
    def start_partition(self) -> int:
        """Partition of its first element."""
        return self.storage.start_partition + self.offset // max(self.row_elements, 1)

    @property
    def free_elements(self) -> int:
        """Elements per partition."""
        return self.size // max(self.shape[0], 1)

    def elements(self, bytes_of: np.ndarray | None = None) -> np.ndarray:
        """The elements, as a NumPy view of the storage, or of a map that holds one byte per byte of it.

        Raises:
            Broken: it reaches outside of the storage.
        """
        kind = self.numpy_type
        source = self.storage.data if bytes_of is None else bytes_of
        size = kind.itemsize
        if bytes_of is not None:
            kind = _UNSIGNED[size]
        shape, strides, offset = self.layout.shape, self.layout.strides, self.layout.offset
        lowest = highest = offset
        for count, stride in zip(shape, strides, strict=True):
            if stride >= 0:
                highest += (count - 1) * stride
            else:
                lowest += (count - 1) * stride
        if lowest < 0 or (highest + 1) * size > source.nbytes:
            raise Broken(
                f"access of elements {lowest} to {highest} of {self!r}, whose memory has {source.nbytes // size}"
            )
        return np.ndarray(shape, kind, source, offset * size, tuple([s * size for s in strides]))

    def moved(self, layout: View, **changes: Any) -> "NkiTensor":
        """Another view of the same storage."""
        values = {"data_type": self.data_type, "indirection": self.indirection, "name": self.name} | changes
        return NkiTensor(self.storage, layout=layout, **values)

    # Views.

    def __getitem__(self, key: Any) -> "NkiTensor":
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(entry is Ellipsis for entry in keys):
            at = next(i for i, entry in enumerate(keys) if entry is Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        require(len(keys) <= self.ndim, f"{len(keys)} indexes for {self!r}")
        result: NkiTensor = self
        integers = []
        for dim, entry in enumerate(keys):
            result, keeps = result._index(dim, entry)
            if not keeps and not (self.on_chip and dim == 0):
                integers.append(dim)
        # On chip a tensor keeps two dimensions at least, in HBM one.
        spare = (2 if self.on_chip else 1) - (self.ndim - len(integers))
        for dim in reversed(integers[: len(integers) - spare] if spare > 0 else integers):
            result = result.moved(views.dropped(result.layout, dim))
        return result

    def _index(self, dim: int, entry: Any) -> "tuple[NkiTensor, bool]":
        """Indexed along one dimension, which keeps a size; and whether the index was no integer."""
        size = self.shape[dim]
        whole = isinstance(entry, slice) and entry == slice(None)
        require(
            whole or dim > 0 or not self._picks_rows(), f"{self!r} has its rows picked by a vector: it has no others"
        )
        if isinstance(entry, slice):
            require(self._static(entry.start) and self._static(entry.stop), "a slice with a register: use nl.ds or .ap")
            start, stop, step = entry.indices(size)
            step_ok = step == 1 or not (self.on_chip and dim == 0)
            require(step_ok, f"step {step} over partitions of {self!r}: partitions cannot be stepped over")
            if entry.stop is not None:
                stop = entry.stop + size if entry.stop < 0 else entry.stop
                if (machine := running()) is not None and stop > size:
                    machine.limit(False, f"slice to {stop} of dimension {dim} of {self!r}")
                    stop = min(stop, size)
            return self.moved(views.sliced(self.layout, dim, start, stop, step)), True
        if isinstance(entry, ds):
            if self._static(entry.start):
                start = int(entry.start)
                return self.moved(views.sliced(self.layout, dim, start, start + entry.size)), True
            sized = self.moved(views.sliced(self.layout, dim, 0, entry.size))
            return sized._dynamic(dim, entry.start, size - entry.size + 1), True
        if self._static(entry):
            index = int(entry) + size if int(entry) < 0 else int(entry)
            return self.moved(views.sliced(self.layout, dim, index, index + 1)), False
        return self.moved(views.sliced(self.layout, dim, 0, 1))._dynamic(dim, entry, size), False

    def _picks_rows(self) -> bool:
        return self.indirection is not None and self.indirection.rows

    @staticmethod
    def _static(value: Any) -> bool:
        return not isinstance(value, VirtualRegister | NkiTensor)

    def _dynamic(self, dim: int, index: Any, extent: int) -> "NkiTensor":
        require(self.indirection is None, f"{self!r} is indirect already")
        require(not (self.on_chip and dim == 0), f"a dynamic index over the partitions of {self!r}")
        return self.moved(self.layout, indirection=Indirection(index, self.strides[dim], extent, rows=False))

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        """Elements start to end (exclusive) of a dimension."""
        require(step == 1 or not (self.on_chip and dim == 0), f"step {step} over partitions of {self!r}")
        return self.moved(views.sliced(self.layout, dim, start, end, step))

    def select(self, dim: int, index: Any) -> "NkiTensor":
        """One element of a dimension, which disappears. The index may be a register or a (1, 1) tensor."""
        if self._static(index):
            taken, _ = self._index(dim, index)
        else:
            taken = self.moved(views.sliced(self.layout, dim, 0, 1))._dynamic(dim, index, self.shape[dim])
        if self.on_chip and dim == 0:
            return taken
        return taken.moved(views.dropped(taken.layout, dim))

    def vector_select(self, dim: int, vector_offset: "NkiTensor") -> "NkiTensor":
        """Row vector_offset[p] for every p; of tensors in HBM, dimension 0."""
        require(dim == 0, f"vector_select of dimension {dim}: only 0 can be selected from")
        require(not self.on_chip, f"vector_select of {self!r}: only tensors in hbm can be indexed by a vector")
        require(self.indirection is None, f"{self!r} is indirect already")
        rows = Indirection(vector_offset, self.strides[0], self.shape[0], rows=True)
        layout = View((vector_offset.shape[0], *self.shape[1:]), (0, *self.strides[1:]), self.offset)
        return self.moved(layout, indirection=rows)

    def permute(self, dims: Sequence[int]) -> "NkiTensor":
        """Dimensions in another order; on chip dimension 0 stays."""
        require(not self.on_chip or dims[0] == 0, f"permute{tuple(dims)} moves the partitions of {self!r}")
        return self.moved(views.permuted(self.layout, dims))

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        """A dimension of size 1 repeated."""
        require(self.shape[dim] == 1, f"broadcast of dimension {dim} of {self!r}: its size is not 1")
        require(not (self.on_chip and dim == 0), f"broadcast over the partitions of {self!r}")
        return self.moved(views.inserted(views.dropped(self.layout, dim), dim, size))

    def expand_dim(self, dim: int) -> "NkiTensor":
        """A new dimension of size 1."""
        require(not (self.on_chip and dim == 0), f"a dimension before the partitions of {self!r}")
        stride = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self.moved(views.inserted(self.layout, dim, 1, stride))

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        """Without a dimension of size 1."""
        require(self.shape[dim] == 1, f"squeeze of dimension {dim} of {self!r}: its size is not 1")
        require(not (self.on_chip and dim == 0), f"squeeze of the partitions of {self!r}")
        return self.moved(views.dropped(self.layout, dim))

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> "NkiTensor":
        """One dimension split into several."""
        require(not (self.on_chip and dim == 0) or len(shape) == 1, f"reshape across the partitions of {self!r}")
        return self.moved(views.split(self.layout, dim, tuple(shape)))

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        """Dimensions start_dim to end_dim (inclusive) as one."""
        require(not self.on_chip or start_dim > 0, f"flatten of the partitions of {self!r}")
        return self.moved(views.flattened(self.layout, start_dim, end_dim))

    def reshape(self, *shape: Any) -> "NkiTensor":
        """Another shape of the same elements; on chip the partitions stay."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else tuple(shape)
        if not self.on_chip:
            return self.moved(views.reshaped(self.layout, sizes))
        require(sizes[0] == self.shape[0], f"reshape of {self!r} to {sizes} mixes partitions and free dimensions")
        free = views.reshaped(View(self.shape[1:], self.strides[1:], self.offset), sizes[1:])
        return self.moved(View(sizes, (self.strides[0], *free.strides), free.offset))

    def rearrange(
        self, src_pattern: Sequence[Any], dst_pattern: Sequence[Any], fixed_sizes: dict[str, int] | None = None
    ) -> "NkiTensor":
        """Split, permute and merge dimensions by name."""
        if self.on_chip:
            require(src_pattern[0] == dst_pattern[0], f"rearrange moves the partitions of {self!r}")
        return self.moved(views.rearranged(self.layout, src_pattern, dst_pattern, fixed_sizes or {}))

    def view(self, dtype: Any) -> "NkiTensor":
        """The same bytes as another type; the last dimension grows or shrinks."""
        target = dtypes.of(dtype)
        old, new = self.numpy_type.itemsize, dtypes.stored(target, self.storage.precise).itemsize
        require(
            self.storage.precise or (old == new and self.data_type.kind == target.kind) or self.data_type.size == old,
            f"{self!r} viewed as {target.name}: NKI_PRECISE_FP=0 keeps no such bytes",
        )
        if old == new:
            return self.moved(self.layout, data_type=target)
        require(self.shape[-1] == 1 or self.strides[-1] == 1, f"{self!r} viewed as {target.name}: its rows are strided")
        require(self.shape[-1] * old % new == 0, f"{self!r} viewed as {target.name}: its rows do not divide")
        scaled = [s * old for s in (self.offset, *self.strides[:-1])]
        sizes = (n for n, s in zip(scaled, (2, *self.shape[:-1]), strict=True) if s > 1)
        require(all(n % new == 0 for n in sizes), f"{self!r} viewed as {target.name}: its rows do not divide")
        layout = View(
            (*self.shape[:-1], self.shape[-1] * old // new), (*(s // new for s in scaled[1:]), 1), scaled[0] // new
        )
        return self.moved(layout, data_type=target)

    reinterpret_cast = view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: "NkiTensor | None" = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> "NkiTensor":
        """An explicit access pattern [[stride, count], ...] of the storage, from this view's offset plus `offset` on.

        scalar_offset (a register or a (1, 1) tensor) moves it by so many elements of dimension `indirect_dim`;
        vector_offset (one index per row, in SBUF) picks a row of dimension 0 for each of the pattern's first dimension.
        """
        machine = current()
        strides, counts = tuple(int(s) for s, _ in pattern), tuple(int(n) for _, n in pattern)
        require(all(n >= 1 for n in counts), f"access pattern {list(pattern)} has an empty dimension")
        require(scalar_offset is None or vector_offset is None, "scalar_offset and vector_offset exclude each other")
        machine.limit(
            self.offset == 0, f".ap of a view with offset {self.offset}: the documents disagree on its meaning"
        )
        require(self.indirection is None, f"{self!r} is indirect already")
        target = self.data_type if dtype is None else dtypes.of(dtype)
        base = self.moved(View((), (), 0), data_type=target)
        start = self.offset * self.numpy_type.itemsize // base.numpy_type.itemsize + (offset or 0)
        indirection = None
        if vector_offset is not None:
            require(not self.on_chip, f"vector_offset of {self!r}: only tensors in hbm can be indexed by a vector")
            require(indirect_dim == 0, f"vector_offset of dimension {indirect_dim}: only 0 can be indexed by a vector")
            indirection = Indirection(vector_offset, self.strides[0], self.shape[0], rows=True)
            strides = (0, *strides[1:])
        elif self.on_chip and counts[0] > 1:
            row = base.row_elements
            require(
                strides[0] == row, f"partition stride {strides[0]} of an access pattern of {self!r}: it must be {row}"
            )
        if scalar_offset is not None:
            require(not self.on_chip or indirect_dim > 0, f"a dynamic offset over the partitions of {self!r}")
            indirection = Indirection(scalar_offset, self.strides[indirect_dim], self.shape[indirect_dim], rows=False)
        if self.on_chip and len(counts) == 1:
            strides, counts = (*strides, 1), (*counts, 1)
        return self.moved(View(counts, strides, start), data_type=target, indirection=indirection)

    def indirect(self, index: "NkiTensor", num_elem: int | None = None) -> "NkiTensor":
        """Tensor indirection of NeuronCore-v4, which the simulator does not have."""
        require(False, "tensor indirection (.indirect) is not simulated")
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        from vllm_neuron.kernels.simulator.sugar import store

        store(self[key], value)
