"""What the NKI kernels of this package share: how work is cut, and the checks of their arguments."""

from typing import Any

import nki.language as nl

PARTITIONS = 128
"""Partitions of SBUF and PSUM."""
BANK = 512
"""float32 elements per partition of a PSUM bank, which is what one matmul writes at most."""
EXACT = 2**24
"""Integers up to here are exact in float32, in which the engines compute indexes and compare."""
DTYPES = ("float32", "bfloat16")
"""Types that the kernels take."""


def share(total: int) -> Any:
    """(first, count) of the rows that this core works on: LNC 2 cuts them into two halves."""
    each = (total + nl.num_programs(axes=0) - 1) // nl.num_programs(axes=0)
    first = min(nl.program_id(0) * each, total)
    return first, min(each, total - first)


def divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is at most `limit`."""
    found = 1
    for candidate in range(1, min(number, limit) + 1):
        if number % candidate == 0:
            found = candidate
    return found


def dtype_of(array: Any) -> str:
    """Name of the data type of a torch or NumPy array."""
    return str(array.dtype).removeprefix("torch.")


def require(holds: bool, argument: str, rule: str, value: Any) -> None:
    """A rule of a kernel for an argument.

    Raises:
        ValueError: it does not hold.
    """
    if not holds:
        raise ValueError(f"{argument} {rule}, not {value}")


def require_array(argument: str, array: Any, shape: tuple[int | str, ...], dtypes: tuple[str, ...] = DTYPES) -> None:
    """The shape and the type of an argument. A name in `shape` stands for any size but 0.

    Raises:
        ValueError: it has others.
    """
    found = tuple(array.shape)
    agrees = len(found) == len(shape) and all(
        size > 0 and (isinstance(wanted, str) or size == wanted) for size, wanted in zip(found, shape, strict=False)
    )
    require(agrees, argument, f"must have shape [{', '.join(map(str, shape))}]", found)
    require(dtype_of(array) in dtypes, argument, f"must be {' or '.join(dtypes)}", dtype_of(array))


def require_cores(lnc: int) -> None:
    """Cores that a kernel runs on.

    Raises:
        ValueError: it is neither 1 nor 2.
    """
    require(lnc in (1, 2), "lnc", "must be 1 or 2", lnc)


def require_window(window: int | None) -> None:
    """Positions that a row looks back on.

    Raises:
        ValueError: there is not even its own.
    """
    require(window is None or window >= 1, "window", "must be 1 or more, or None", window)


def require_chunks(argument: str, size: int, most: int) -> None:
    """A dimension that is contracted: cut into at most `most` chunks of equal size, of up to 128 elements.

    Raises:
        ValueError: it cannot be.
    """
    chunks = size // divisor(size, PARTITIONS)
    rule = f"must have a contracted dimension of at most {most} equal chunks of up to {PARTITIONS}"
    require(chunks <= most, argument, rule, f"{size}, of {chunks} chunks")
