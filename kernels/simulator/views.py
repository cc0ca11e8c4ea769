"""Views of tensors as pure functions of (shape, strides, offset), all in elements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_neuron.kernels.simulator.errors import Broken, require


@dataclass(frozen=True)
class View:
    """Which elements of a storage a tensor is: element i at offset + sum(i * strides)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ds:
    """`size` elements from `start` on, as `nki.language.ds`. `start` may be a register."""

    start: Any
    size: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the dimensions lie one after another, row-major; those of size 1 do not count."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The same accesses in as few (stride, size) dimensions as possible, outermost first."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][0] == stride * size:
            dims[-1] = (stride, dims[-1][1] * size)
        else:
            dims.append((stride, size))
    return dims


def sliced(view: View, dim: int, start: int, stop: int, step: int = 1) -> View:
    """Elements start, start + step, ... below stop of a dimension.

    Raises:
        Broken: nothing is left, or it reaches beyond the dimension.
    """
    size = view.shape[dim]
    require(step >= 1, f"step {step} of a slice is below 1")
    require(0 <= start < stop <= size, f"slice {start}:{stop} of dimension {dim}, which has {size} elements")
    count = -(-(stop - start) // step)
    return View(
        (*view.shape[:dim], count, *view.shape[dim + 1 :]),
        (*view.strides[:dim], view.strides[dim] * step, *view.strides[dim + 1 :]),
        view.offset + start * view.strides[dim],
    )


def dropped(view: View, dim: int) -> View:
    """Without a dimension (its element 0)."""
    return View(view.shape[:dim] + view.shape[dim + 1 :], view.strides[:dim] + view.strides[dim + 1 :], view.offset)


def inserted(view: View, dim: int, size: int = 1, stride: int = 0) -> View:
    """With a further dimension before `dim`."""
    return View(
        (*view.shape[:dim], size, *view.shape[dim:]), (*view.strides[:dim], stride, *view.strides[dim:]), view.offset
    )


def split(view: View, dim: int, sizes: Sequence[int]) -> View:
    """One dimension as several; one size may be -1.

    Raises:
        Broken: the sizes do not multiply to that of the dimension.
    """
    known = math.prod(size for size in sizes if size != -1)
    sizes = tuple(view.shape[dim] // max(known, 1) if size == -1 else size for size in sizes)
    require(math.prod(sizes) == view.shape[dim], f"dimension of size {view.shape[dim]} split into {sizes}")
    strides = tuple(stride * view.strides[dim] for stride in row_major(sizes))
    return View(
        (*view.shape[:dim], *sizes, *view.shape[dim + 1 :]),
        (*view.strides[:dim], *strides, *view.strides[dim + 1 :]),
        view.offset,
    )


def flattened(view: View, first: int, last: int) -> View:
    """Dimensions first to last (inclusive) as one.

    Raises:
        Broken: they do not lie one after another.
    """
    dims = merged(view.shape[first : last + 1], view.strides[first : last + 1])
    require(
        len(dims) <= 1, f"dimensions {first} to {last} of {view.shape} with strides {view.strides} are not contiguous"
    )
    stride, size = dims[0] if dims else (1, 1)
    return View(
        (*view.shape[:first], size, *view.shape[last + 1 :]),
        (*view.strides[:first], stride, *view.strides[last + 1 :]),
        view.offset,
    )


def reshaped(view: View, shape: Sequence[int]) -> View:
    """The same elements in the same order in another shape, without a copy.

    Raises:
        Broken: the number of elements differs, or the strides do not allow it.
    """
    shape = tuple(shape)
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape = tuple(view.size // max(known, 1) if size == -1 else size for size in shape)
    require(math.prod(shape) == view.size, f"reshape of {view.shape} to {shape}: the number of elements differs")
    strides: list[int] = []
    old = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if size != 1]
    for size in reversed(shape):
        if size == 1:
            strides.append(1)
            continue
        inner_size, stride = old.pop()
        while inner_size < size and old and old[-1][1] == stride * inner_size:
            inner_size *= old.pop()[0]
        if inner_size % size:
            raise Broken(f"reshape of {view.shape} with strides {view.strides} to {shape} needs a copy")
        strides.append(stride)
        if inner_size > size:
            old.append((inner_size // size, stride * size))
    return View(shape, tuple(reversed(strides)), view.offset)


def permuted(view: View, dims: Sequence[int]) -> View:
    """With its dimensions in another order.

    Raises:
        Broken: dims is no permutation.
    """
    require(
        sorted(dims) == list(range(len(view.shape))), f"{tuple(dims)} is no permutation of {len(view.shape)} dimensions"
    )
    return View(tuple(view.shape[d] for d in dims), tuple(view.strides[d] for d in dims), view.offset)


def rearranged(view: View, source: Sequence[Any], result: Sequence[Any], sizes: dict[str, int]) -> View:
    """einops-style: split, permute and merge by names, e.g. ("b", ("h", "w")) to ("b", "w", "h") with {"h": 4}.

    Raises:
        Broken: the patterns do not name the same dimensions, or a merge needs a copy.
    """
    require(len(source) == len(view.shape), f"pattern {source} for a tensor of {len(view.shape)} dimensions")
    names: list[str] = []
    for entry in source:
        group = (entry,) if isinstance(entry, str) else tuple(entry)
        view = split(
            view, len(names), tuple(sizes.get(name, -1 if len(group) > 1 else view.shape[len(names)]) for name in group)
        )
        names.extend(group)
    groups = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in result]
    wanted = [name for group in groups for name in group]
    require(sorted(wanted) == sorted(names), f"patterns {source} and {result} name different dimensions")
    view = permuted(view, [names.index(name) for name in wanted])
    for position, group in enumerate(groups):
        view = flattened(view, position, position + len(group) - 1) if len(group) > 1 else view
    return view
