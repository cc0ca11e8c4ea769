"""The interface of a compile route, in the manner of JAX's ahead-of-time stages.

    traced = route.trace(name, step, weights, kv_cache, inputs)      a graph, nothing executed
    lowered = traced.lower()                                         the route's own text: FX or StableHLO
    executable = lowered.compile()                                   runs; can be saved
    executable = route.load(blob)                                    what executable.save() wrote, in a later process

Arguments are pytrees of tensors (dicts, tuples, lists, NamedTuples). For tracing only shapes, dtypes and strides count:
meta tensors will do. For running, weights and KV cache are first placed, because a route may want another form or
another memory for them.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PyTree = Any
Placed = Any
"""Weights or KV cache in the form a route holds them; opaque to everybody else."""

Step = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""step(weights, kv_cache, inputs) -> (outputs, kv_cache), a pure function of tensors."""


@dataclass(frozen=True)
class Target:
    """What a route compiles for.

    Attributes:
        platform: "cpu", "trn2" or "trn3".
        compile_only: this machine has no such device. Nothing is placed, allocated or run; executables can be saved.
    """

    platform: str
    compile_only: bool = False


CPU = Target("cpu")


def is_installed(module: str) -> bool:
    """Whether a top-level module could be imported. It is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # loaded, and not by a finder
        return True


@dataclass(frozen=True)
class Probe:
    """Whether a route works in this process, and why not (with the remedy)."""

    works: bool
    reason: str
    versions: dict[str, str]


class Executable(Protocol):
    """A compiled graph.

    Calling it consumes the KV cache that is handed in (its memory is donated to the result): keep only the returned
    one. Inputs are CPU tensors with exactly the traced shapes and dtypes; outputs are CPU tensors whose memory no later
    call touches.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, weights: Placed, kv_cache: Placed, inputs: PyTree) -> tuple[PyTree, Placed]: ...

    def save(self) -> bytes:
        """What `Route.load` turns into this executable again, in another process of the same versions and target."""
        ...


class Lowered(Protocol):
    """A graph in the route's own representation."""

    @property
    def name(self) -> str: ...

    def text(self) -> str:
        """The representation as text: no paths, addresses or object ids, so equal graphs have equal text."""
        ...

    def arguments(self) -> tuple[str, ...]:
        """Dtype, shape and stride of each argument, a line each."""
        ...

    def kernel_packages(self) -> tuple[str, ...]:
        """Packages and modules of the kernels that the graph calls by name, whose bodies its text does not show."""
        ...

    def compile(self) -> Executable: ...


class Traced(Protocol):
    """A captured graph, before the route's own lowering."""

    @property
    def name(self) -> str: ...

    def text(self) -> str: ...

    def lower(self) -> Lowered: ...


class Route(Protocol):
    """One way from a pure step function to something that runs."""

    @property
    def name(self) -> str:
        """The value of VLLM_NEURON_BACKEND that selects it."""
        ...

    @property
    def target(self) -> Target:
        """What its executables run on."""
        ...

    def missing(self) -> str | None:
        """Packages that the route needs and that are not installed, with the remedy. Nothing is imported for it."""
        ...

    def probe(self) -> Probe: ...

    def versions(self) -> dict[str, str]:
        """Versions of everything whose change may change the compiled code; part of the cache key."""
        ...

    def flags(self) -> tuple[str, ...]:
        """What is handed to the compiler beside the graph; part of the cache key."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of ours that decide what a trace is lowered to; their sources are part of the cache key."""
        ...

    def trace(self, name: str, step: Step, weights: PyTree, kv_cache: PyTree, inputs: PyTree) -> Traced:
        """Capture `step` for these shapes. Raises if the step depends on values or would fall back to eager."""
        ...

    def load(self, blob: bytes) -> Executable:
        """Raises ValueError if the blob is not one of this route's, or of other versions."""
        ...

    def place_weights(self, weights: PyTree) -> Placed:
        """Weights in the form this route's executables take. The caller drops its own references afterwards."""
        ...

    def allocate_kv_cache(self, shapes: Sequence[tuple[int, ...]], dtype: Any) -> Placed:
        """A zeroed KV cache: one (keys, values) pair per layer, each of the layer's shape."""
        ...
