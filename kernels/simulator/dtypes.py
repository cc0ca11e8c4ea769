"""NKI's data types, which are strings, and the casts that engines do when they read and write."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """A data type of NKI.

    Attributes:
        name: e.g. "bfloat16".
        kind: "float", "int" (signed), "uint" (unsigned, and bool), or "packed" (four values of an MX format).
        numpy: how elements are stored.
        max: largest finite value of a float type, else 0.
    """

    name: str
    kind: str
    numpy: np.dtype
    max: float = 0.0

    @property
    def size(self) -> int:
        """Bytes per element."""
        return self.numpy.itemsize


def _float(name: str, scalar: Any) -> DType:
    return DType(name, "float", np.dtype(scalar), float(ml_dtypes.finfo(scalar).max))


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        _float("float32", np.float32),
        _float("float16", np.float16),
        _float("bfloat16", ml_dtypes.bfloat16),
        _float("float8_e4m3", ml_dtypes.float8_e4m3),
        _float("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        _float("float8_e5m2", ml_dtypes.float8_e5m2),
        _float("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu),
        DType("tfloat32", "float", np.dtype(np.float32), float(np.finfo(np.float32).max)),
        *(DType(name, name.rstrip("0123456789"), np.dtype(name)) for name in ("int8", "int16", "int32")),
        *(DType(name, name.rstrip("0123456789"), np.dtype(name)) for name in ("uint8", "uint16", "uint32")),
        DType("bool", "uint", np.dtype(np.uint8)),
        DType("float8_e4m3fn_x4", "packed", np.dtype(np.uint32)),
        DType("float8_e5m2_x4", "packed", np.dtype(np.uint32)),
        DType("float4_e2m1fn_x4", "packed", np.dtype(np.uint16)),
    )
}

_ALIASES = {"float8e4": "float8_e4m3", "float8e5": "float8_e5m2", "bool_": "bool"}
"""Names of the first NKI releases that kernels still compare with."""

FP8 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
FP32 = ("float32", "tfloat32")


@cache
def named(name: str) -> DType:
    """The data type of a name.

    Raises:
        KeyError: NKI has no such type.
    """
    return DTYPES[_ALIASES.get(name, name)]


def of(dtype: Any) -> DType:
    """The data type that a kernel or an array means: a name, a NumPy, ml_dtypes or torch type.

    Raises:
        KeyError: NKI has no such type.
    """
    if isinstance(dtype, str):
        return named(dtype)
    if isinstance(dtype, DType):
        return dtype
    text = str(dtype)
    if text.startswith("torch."):
        return named(text.removeprefix("torch."))
    return named(np.dtype(dtype).name)


@cache
def stored(dtype: DType, precise: bool) -> np.dtype:
    """How elements lie in the simulator's memory: NKI_PRECISE_FP=0 keeps every float type in float32."""
    return np.dtype(np.float32) if dtype.kind == "float" and not precise else dtype.numpy


def compute(values: np.ndarray) -> np.ndarray:
    """What an arithmetic engine computes with: float32, also for integers (exact below 2^24 only)."""
    return values if values.dtype == np.float32 else values.astype(np.float32)


def round_tf32(values: np.ndarray) -> np.ndarray:
    """float32 rounded to tfloat32's 10 bits of mantissa, to nearest even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~np.uint64(0x1FFF)
    return np.where(np.isfinite(values), rounded.astype(np.uint32).view(np.float32), values)


def cast(values: np.ndarray, dtype: DType, storage: np.dtype) -> np.ndarray:
    """float32 (or int64) results in the destination's type.

    Float types round to nearest even and overflow as their format does; integers round to nearest even and saturate;
    NaN becomes 0.
    """
    if dtype.name == "tfloat32":
        return round_tf32(values)
    if values.dtype == storage:
        return values
    if dtype.kind == "float":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float32).astype(storage)
    if values.dtype.kind in "iub":
        return values.astype(storage)
    low, high = np.iinfo(storage).min, np.iinfo(storage).max
    rounded = np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=high, neginf=low))
    return np.clip(rounded, low, high).astype(storage)
