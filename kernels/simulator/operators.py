"""The operators that instructions take: ALU operators and activation functions, by the names of `nki.language`."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from vllm_neuron.kernels.simulator.errors import Broken

Array = np.ndarray


@dataclass(frozen=True)
class Operator:
    """An ALU operator.

    Attributes:
        name: as in `nki.language`.
        kind: "arithmetic", "unary" (arithmetic, of one operand) or "bitwise".
        function: of NumPy arrays; float32 for arithmetic, integers for bitwise.
        identity: start value of a reduction, None where the operator cannot reduce.
        in_isa: the hardware has it; the others only exist in AWS's simulator.
    """

    name: str
    kind: str
    function: Callable[..., Array]
    identity: float | None = None
    in_isa: bool = True


def _logical(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: function(a != 0, b != 0).astype(np.float32)


def _compare(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: function(a, b).astype(np.float32)


def _shift(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def shifted(a: Array, b: Any) -> Array:
        # A logical shift of the bit pattern: unsigned, whatever the type is.
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return function(a.view(bits), np.asarray(b).astype(bits)).view(a.dtype)

    return shifted


_ALU = (
    Operator("add", "arithmetic", np.add, 0.0),
    Operator("subtract", "arithmetic", np.subtract, 0.0),
    Operator("multiply", "arithmetic", np.multiply, 1.0),
    Operator("maximum", "arithmetic", np.maximum, -np.inf),
    Operator("minimum", "arithmetic", np.minimum, np.inf),
    *(
        Operator(name, "arithmetic", _compare(getattr(np, name)))
        for name in ("equal", "not_equal", "greater_equal", "greater", "less_equal", "less")
    ),
    Operator("logical_and", "arithmetic", _logical(np.logical_and), 1.0),
    Operator("logical_or", "arithmetic", _logical(np.logical_or), 0.0),
    Operator("logical_xor", "arithmetic", _logical(np.logical_xor), 0.0),
    Operator("power", "arithmetic", np.power),
    Operator("abs_max", "arithmetic", lambda a, b: np.maximum(np.abs(a), np.abs(b))),
    Operator("abs_min", "arithmetic", lambda a, b: np.minimum(np.abs(a), np.abs(b))),
    Operator("divide", "arithmetic", np.divide, in_isa=False),
    Operator("mod", "arithmetic", np.mod, in_isa=False),
    Operator("fmod", "arithmetic", np.fmod, in_isa=False),
    Operator("abs", "unary", np.abs),
    Operator("square", "unary", np.square),
    Operator("relu", "unary", lambda a: np.maximum(a, 0)),
    Operator("rsqrt", "unary", lambda a: 1 / np.sqrt(a)),
    Operator("reciprocal", "unary", np.reciprocal),
    Operator("bypass", "unary", lambda a: a),
    Operator("invert", "bitwise", np.invert),
    Operator("bitwise_and", "bitwise", operator.and_, -1),
    Operator("bitwise_or", "bitwise", operator.or_, 0),
    Operator("bitwise_xor", "bitwise", operator.xor, 0),
    Operator("left_shift", "bitwise", _shift(np.left_shift)),
    Operator("right_shift", "bitwise", _shift(np.right_shift)),
)
ALU: dict[str, Operator] = {entry.name: entry for entry in _ALU}
_ALIASES = {
    "max": "maximum", "min": "minimum", "sum": "add", "bitwise_not": "invert", "absolute": "abs", "copy": "bypass",
    "true_divide": "divide", "remainder": "mod", "float_power": "power",
}  # fmt: skip
COMPARISONS = ("equal", "not_equal", "greater_equal", "greater", "less_equal", "less")


def name_of(op: Any) -> str:
    """The name of an operator that a kernel passed: a function of `nki.language`, or a NumPy function of that name."""
    return getattr(op, "__name__", str(op))


def alu(op: Any) -> Operator:
    """The ALU operator that a kernel passed as `op`.

    Raises:
        Broken: there is none of that name.
    """
    name = name_of(op)
    found = ALU.get(_ALIASES.get(name, name))
    if found is None:
        raise Broken(f"{name} is not an ALU operator; there are {', '.join(ALU)}")
    return found


def _sigmoid(x: Array) -> Array:
    return special.expit(x)


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + special.erf(x / np.sqrt(2)))


def _gelu_dx(x: Array) -> Array:
    return 0.5 * (1 + special.erf(x / np.sqrt(2))) + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _gelu_sigmoid_dx(x: Array) -> Array:
    s = _sigmoid(1.702 * x)
    return s + 1.702 * x * s * (1 - s)


def _silu_dx(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _sin(x: Array) -> Array:
    """No range reduction: outside [-pi, pi] the engine extrapolates the cubic of its last interval.

    The documentation gives one point, sin(9) = 27.65: the cubic with the slope and the zero of sine at pi goes
    through it.
    """
    outside = np.abs(x) - np.pi
    cubic = (27.65 + (9.0 - np.pi)) / (9.0 - np.pi) ** 3
    return np.where(outside > 0, np.sign(x) * (cubic * outside**3 - outside), np.sin(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_dx": _gelu_dx,
    "gelu_apprx_tanh": _gelu_tanh,
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "gelu_apprx_sigmoid_dx": _gelu_sigmoid_dx,
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(0, x),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "erf": special.erf,
    "erf_dx": lambda x: 2 / np.sqrt(np.pi) * np.exp(-(x**2)),
    "exp": np.exp,
    "log": np.log,
    "sin": _sin,
    "arctan": np.arctan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": np.reciprocal,
    "sign": np.sign,
    "abs": np.abs,
}
RANGES: dict[str, tuple[float, float]] = {
    "log": (2.0**-64, 2.0**64),
    "sin": (-np.pi, np.pi),
    "arctan": (-np.pi / 2, np.pi / 2),
    "sqrt": (2.0**-116, 2.0**118),
    "rsqrt": (2.0**-87, 2.0**97),
}
"""Input range of activation functions outside of which the engine's result is invalid."""


def activation(op: Any) -> str:
    """The name of the activation function that a kernel passed as `op`.

    Raises:
        Broken: there is none of that name.
    """
    name = "copy" if name_of(op) == "bypass" else name_of(op)
    if name not in ACTIVATIONS and name != "prelu":
        raise Broken(f"{name} is not an activation function; there are {', '.join(ACTIVATIONS)}, prelu")
    return name


def activate(name: str, x: Array, slope: Any = 0.0) -> Array:
    """An activation function of float32 values, in float32.

    Args:
        name: of ACTIVATIONS, or "prelu".
        x: the input.
        slope: of prelu for negative inputs.
    """
    with np.errstate(all="ignore"):
        if name == "prelu":
            return np.where(x > 0, x, x * slope).astype(np.float32)
        return ACTIVATIONS[name](x).astype(np.float32)
