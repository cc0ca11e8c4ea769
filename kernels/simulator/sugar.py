"""The functions of `nki.language` that are short for instructions: each allocates its result in SBUF."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import dtypes, isa
from vllm_neuron.kernels.simulator.errors import Broken, require
from vllm_neuron.kernels.simulator.isa.compute import compute
from vllm_neuron.kernels.simulator.machine import current
from vllm_neuron.kernels.simulator.operators import ACTIVATIONS, ALU
from vllm_neuron.kernels.simulator.storage import MemoryRegion
from vllm_neuron.kernels.simulator.tensor import NkiTensor
from vllm_neuron.kernels.simulator.views import View, row_major


def allocate(
    shape: Any, dtype: Any, region: MemoryRegion = MemoryRegion.sbuf, name: str = "", address: Any = None
) -> NkiTensor:
    """A new, uninitialised tensor.

    Raises:
        Broken: no memory of the region can have this shape, or NKI has no such type.
    """
    machine = current()
    sizes = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(size) for size in shape)
    require(len(sizes) >= 1 and all(size >= 1 for size in sizes), f"shape {sizes} has an empty dimension")
    try:
        kind = dtypes.of(dtype)
    except (KeyError, TypeError):
        raise Broken(f"{dtype!r} is no data type of NKI; there are {', '.join(dtypes.DTYPES)}") from None
    place = None if address is None else (int(address[0]), int(address[1]))
    region = MemoryRegion(region) if isinstance(region, str) else region

    def make() -> Any:
        return machine.allocate(region, sizes, kind, name, place)

    if region is MemoryRegion.shared_hbm and machine.team.size > 1:
        machine.shared_count += 1
        storage = machine.team.shared(machine.shared_count, (sizes, kind.name), make)
    else:
        storage = make()
    return NkiTensor(storage, kind, View(sizes, row_major(sizes), 0), name=name)


def result(like: NkiTensor, dtype: Any = None, shape: tuple[int, ...] | None = None) -> NkiTensor:
    """A new tensor in SBUF for a result of the shape of `like`."""
    return allocate(like.shape if shape is None else shape, like.dtype if dtype is None else dtype)


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A tensor of HBM in SBUF."""
    loaded = result(src, dtype)
    isa.dma_copy(loaded, src)
    return loaded


def store(dst: NkiTensor, value: Any) -> None:
    """A tile, or a number, into a tensor."""
    if not isinstance(value, NkiTensor):
        isa.memset(dst, value)
    elif dst.on_chip and value.on_chip:
        isa.tensor_copy(dst, value)
    elif value.buffer is MemoryRegion.psum:
        isa.dma_copy(dst, copy(value))
    else:
        isa.dma_copy(dst, value)


def copy(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A copy in SBUF."""
    copied = result(x, dtype)
    isa.tensor_copy(copied, x)
    return copied


def fill(tensor: NkiTensor, value: Any) -> NkiTensor:
    """A tensor, all of whose elements are `value`; in HBM through SBUF."""
    value = value if tensor.data_type.kind == "float" else int(value)
    if tensor.on_chip:
        isa.memset(tensor, value)
        return tensor
    rows = math.gcd(tensor.size, 128)
    tile = allocate((rows, tensor.size // rows), tensor.dtype)
    isa.memset(tile, value)
    isa.dma_copy(tensor, tile)
    return tensor


def _broadcast(x: NkiTensor, y: NkiTensor) -> tuple[NkiTensor, NkiTensor]:
    """Both with the same free shape, by strides of 0."""
    if x.shape == y.shape:
        return x, y
    require(x.ndim == y.ndim and x.shape[0] == y.shape[0], f"{x!r} and {y!r} do not broadcast")
    for dim in range(1, x.ndim):
        if x.shape[dim] != y.shape[dim]:
            x, y = (x.broadcast(dim, y.shape[dim]), y) if x.shape[dim] == 1 else (x, y.broadcast(dim, x.shape[dim]))
    return x, y


def binary(name: str) -> Callable[..., NkiTensor]:
    """The function of two operands that is short for tensor_tensor or tensor_scalar."""

    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        if not isinstance(x, NkiTensor):
            output = result(y, dtype)
            isa.tensor_scalar(output, y, function, x, reverse0=True)
        elif not isinstance(y, NkiTensor):
            output = result(x, dtype)
            isa.tensor_scalar(output, x, function, y)
        else:
            left, right = _broadcast(x, y)
            output = result(left, dtype)
            isa.tensor_tensor(output, left, right, function)
        return output

    return _named(function, name, "Element-wise; an ALU operator where an instruction takes one.")


def unary(name: str) -> Callable[..., NkiTensor]:
    """The function of one operand that is short for activation."""

    def function(x: NkiTensor, dtype: Any = None) -> NkiTensor:
        output = result(x, dtype)
        isa.activation(output, function, x)
        return output

    return _named(function, name, "Element-wise; an activation function where an instruction takes one.")


def reduction(name: str, operator: str) -> Callable[..., NkiTensor]:
    """The function that is short for tensor_reduce."""

    def function(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
        axes = sorted(a + x.ndim if a < 0 else a for a in ([axis] if isinstance(axis, int) else axis))
        kept = tuple(1 if dim in axes else size for dim, size in enumerate(x.shape))
        shape = kept if keepdims else tuple(size for dim, size in enumerate(x.shape) if dim not in axes)
        output = result(x, dtype, shape if len(shape) > 1 else (*shape, 1))
        isa.tensor_reduce(output, _named(function, operator, ""), x, axes)
        _named(function, name, "")
        return output

    return _named(function, name, "Reduce the last free dimensions.")


def _named(function: Callable[..., Any], name: str, text: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text or function.__doc__
    return function


def computed(name: str, function: Callable[[np.ndarray], np.ndarray]) -> Callable[..., NkiTensor]:
    """A function that NKI builds out of several instructions, done in one step in float32."""

    def apply(x: NkiTensor, dtype: Any = None) -> NkiTensor:
        output = result(x, dtype)
        compute(output, x, function)
        return output

    return _named(apply, name, "Element-wise.")


_ONE_OPERAND = (*ACTIVATIONS, "prelu", "bypass", "invert")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: binary(name) for name, entry in ALU.items() if entry.kind != "unary" and name not in _ONE_OPERAND},
    **{name: unary(name) for name in _ONE_OPERAND},
    "copy": copy,
    **{
        name: reduction(name, operator)
        for name, operator in (
            ("sum", "add"),
            ("max", "maximum"),
            ("min", "minimum"),
            ("prod", "multiply"),
            ("all", "logical_and"),
        )
    },
    **{
        name: computed(name, getattr(np, name))
        for name in ("cos", "tan", "sin", "ceil", "floor", "trunc", "negative", "logical_not")
    },
}
"""Functions of `nki.language` by name: operators where an instruction takes one, else short for instructions."""


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The mean along the last free dimensions."""
    total = FUNCTIONS["sum"](x, axis, "float32", keepdims)
    return FUNCTIONS["multiply"](total, total.size / x.size, dtype or x.dtype)


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = True) -> NkiTensor:
    """The variance along the last free dimensions, which stay with size 1."""
    centred = FUNCTIONS["subtract"](x, mean(x, axis, "float32", keepdims=True), "float32")
    return mean(FUNCTIONS["square"](centred), axis, dtype or x.dtype, keepdims=True)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Softmax along the last free dimensions."""
    top = FUNCTIONS["max"](x, axis, "float32", keepdims=True)
    powers = FUNCTIONS["exp"](FUNCTIONS["subtract"](x, top, "float32"))
    total = FUNCTIONS["sum"](powers, axis, "float32", keepdims=True)
    return FUNCTIONS["multiply"](powers, FUNCTIONS["reciprocal"](total), dtype or x.dtype)


def rms_norm(
    x: NkiTensor, w: NkiTensor, axis: Any, n: int, epsilon: float = 1e-06, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """x / sqrt(mean(x^2) + epsilon) * w."""
    inner = compute_dtype or "float32"
    total = FUNCTIONS["sum"](FUNCTIONS["square"](x, inner), axis, "float32", keepdims=True)
    scale = result(total)
    isa.activation(scale, FUNCTIONS["rsqrt"], total, bias=epsilon, scale=1.0 / n)
    return FUNCTIONS["multiply"](FUNCTIONS["multiply"](x, scale, inner), w, dtype or x.dtype)
