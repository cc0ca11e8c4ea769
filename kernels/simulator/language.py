"""`nki.language`: memories, types, loops, operators, and the functions that are short for instructions."""

import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, isa, sugar
from vllm_neuron.kernels.simulator.errors import Broken, Violation, kernel_line, require
from vllm_neuron.kernels.simulator.isa.compute import compute
from vllm_neuron.kernels.simulator.machine import current, running
from vllm_neuron.kernels.simulator.objects import NKIObject
from vllm_neuron.kernels.simulator.registers import VirtualRegister
from vllm_neuron.kernels.simulator.storage import MemoryRegion
from vllm_neuron.kernels.simulator.sugar import load, mean, rms_norm, softmax, store, var
from vllm_neuron.kernels.simulator.targets import TRN2
from vllm_neuron.kernels.simulator.tensor import NkiTensor
from vllm_neuron.kernels.simulator.views import dropped, ds, inserted

__all__ = ["MemoryRegion", "NKIObject", "NkiTensor", "VirtualRegister", "ds", "load", "mean", "rms_norm", "softmax",
           "store", "var"]  # fmt: skip

DType = str
globals().update({name: name for name in dtypes.DTYPES if name != "bool"})
bool_ = "bool"
globals()["bool"] = "bool"

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm
tensor = NkiTensor


def is_hbm(buffer: MemoryRegion) -> bool:
    """Whether it is HBM of either kind."""
    return not buffer.on_chip


def is_on_chip(buffer: MemoryRegion) -> bool:
    """Whether it is SBUF or PSUM."""
    return buffer.on_chip


def is_psum(buffer: MemoryRegion) -> bool:
    """Whether it is PSUM."""
    return buffer is psum


def is_sbuf(buffer: MemoryRegion) -> bool:
    """Whether it is SBUF."""
    return buffer is sbuf


class _TileSize:
    """Sizes of the hardware."""

    pmax = 128
    psum_fmax = psum_bank_fmax = 512
    psum_bank_fmax_bytes = 2048
    psum_num_banks = 8
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 1

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Bytes of SBUF per partition that a kernel may use."""
        machine = running()
        return (TRN2 if machine is None else machine.target).sbuf_bytes

    total_available_sbuf_size = sbuf_fmax_bytes

    @property
    def sbuf_fmax(self) -> int:
        """The same in float32 elements."""
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        """Bytes of SBUF in all partitions."""
        return self.sbuf_fmax_bytes * self.pmax


tile_size = _TileSize()


# Allocation.


def ndarray(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "", address: Any = None) -> NkiTensor:
    """A new, uninitialised tensor. On chip the first dimension is the partitions.

    Raises:
        Violation: no memory of the region can have this shape.
    """
    try:
        return sugar.allocate(shape, dtype, buffer, name, address)
    except Broken as broken:
        raise Violation("ndarray", str(broken), "", kernel_line()) from None


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor full of a value."""
    return sugar.fill(ndarray(shape, dtype, buffer, name), fill_value)


def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor full of 0."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor full of 1."""
    return full(shape, 1, dtype, buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """A new, uninitialised tensor of another's shape."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """A new tensor of 0 of another's shape."""
    return sugar.fill(empty_like(x, dtype, buffer, name), 0)


def shared_constant(constant: Any) -> NkiTensor:
    """A constant in HBM: a NumPy array, or the path of an .npy file."""
    values = np.load(constant) if isinstance(constant, str | Path) else np.asarray(constant)
    made = ndarray(values.shape, dtypes.of(values.dtype), private_hbm)
    made.elements()[...] = values.astype(made.numpy_type)
    made.storage.written = None
    return made


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """The identity of n rows in SBUF."""
    made = ndarray((n, n), dtype) if dst is None else dst
    isa.dma_copy(made, shared_constant(np.eye(n, dtype=np.float32).astype(made.numpy_type)).view(made.dtype))
    return made


def rand(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of random numbers in [0, 1)."""
    made = full(shape, 0, dtype, buffer, name)
    compute(made, made, lambda x: current().random.random(x.shape, dtype=np.float32))
    return made


# The grid and loops.


def program_id(axis: int = 0) -> int:
    """Which of the cores that run the kernel this is."""
    require(axis == 0, f"program_id({axis}): the grid has one dimension")
    return current().rank


def num_programs(axes: Any = 0) -> int:
    """How many cores run the kernel."""
    return current().team.size


def program_ndim() -> int:
    """Dimensions of the grid: 0 when the kernel was launched without one."""
    return 1 if current().team.size > 1 else 0


def _bounds(start: Any, stop: Any, step: Any) -> builtins.range:
    first, last = (0, start) if stop is None else (start, stop)
    return builtins.range(*(v.read() if isinstance(v, VirtualRegister) else int(v) for v in (first, last, step)))


def affine_range(start: Any, stop: Any = None, step: int = 1) -> builtins.range:
    """A loop that is unrolled when the kernel is built."""
    for bound in (start, stop, step):
        if isinstance(bound, VirtualRegister):
            raise TypeError("a loop that is unrolled cannot have a register as its bound: use nl.fori_loop")
    return _bounds(start, stop, step)


sequential_range = static_range = range = affine_range


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """A loop of the device; deprecated since NKI 0.6 for fori_loop."""
    for value in _bounds(start, stop, step):
        yield VirtualRegister(value, frozen=True)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], Any], step: int = 1) -> None:
    """A loop of the device: body_fun(i) with i in a register."""
    for value in _bounds(lower, upper, step):
        body_fun(VirtualRegister(value))


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """A loop of the device: while the register is not 0, the register is what body_fun(register) returns."""
    condition = init
    while condition.read() != 0:
        condition = body_fun(VirtualRegister(condition.read()))


def no_reorder() -> None:
    """A scheduling hint, which changes no result."""


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor."""
    print(print_prefix, np.asarray(tensor))


# Operators and functions that are short for instructions.

globals().update(sugar.FUNCTIONS)


def average() -> None:
    """The mean, as an operator of tensor_partition_reduce."""


def where(condition: NkiTensor, x: NkiTensor, y: NkiTensor, dtype: Any = None) -> NkiTensor:
    """x where condition is not 0, else y."""
    output = sugar.copy(y, dtype)
    mask = sugar.copy(condition, "uint8")
    isa.tensor_copy_predicated(output, sugar.copy(x, output.dtype), mask)
    return output


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """With a further dimension of size 1."""
    return x.expand_dim(axis)


def broadcast_to(x: NkiTensor, shape: Any, dtype: Any = None) -> NkiTensor:
    """A copy, repeated along dimensions of size 1; along the partitions by a DMA, which can read one many times."""
    layout = x.layout
    for dim, size in enumerate(shape):
        layout = layout if layout.shape[dim] == size else inserted(dropped(layout, dim), dim, size)
    if shape[0] == x.shape[0]:
        return sugar.copy(x.moved(layout), dtype)
    repeated = ndarray(shape, dtype or x.dtype)
    isa.dma_copy(repeated, x.moved(layout))
    return repeated


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Partitions and free elements swapped."""
    turned = ndarray((x.free_elements, x.shape[0]), x.dtype, psum)
    isa.nc_transpose(turned, x)
    return sugar.copy(turned, dtype)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A matrix of HBM in SBUF, transposed."""
    turned = ndarray((src.shape[1], src.shape[0]), src.dtype)
    isa.dma_transpose(turned, src)
    return turned if dtype is None else sugar.copy(turned, dtype)


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x @ y in PSUM; with transpose_x x.T @ y, which needs no transpose."""
    left = x if transpose_x else transpose(x)
    product = ndarray((left.free_elements, y.free_elements), "float32", psum)
    isa.nc_matmul(product, left, y, accumulate=False)
    return product


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """data[p, indices[p, i]] of the flattened free elements."""
    output = sugar.result(indices, data.dtype)
    isa.nc_n_gather(output, data, indices)
    return output


def random_seed(seed: int) -> None:
    """Seed rand and dropout."""
    current().random = np.random.default_rng(int(seed))


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """x with every element set to 0 with a probability."""
    output = sugar.result(x, dtype)
    isa.dropout(output, x, rate)
    return output
