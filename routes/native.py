"""The native route: PyTorch's own graph (FX over ATen), compiled for the CPU or by Neuron's torch backend.

A step is captured on fake tensors, the KV cache is donated (updated in place), and what remains is straight-line code
over operators. In CPU mode that is what runs, with the kernels that were selected while tracing: called from C++ where
these are C++ kernels, as it is where they are ATen's, for the torch twins. There is no guard and no dispatch on modules
per step, and compiling takes no time beyond the trace.

On Neuron devices the same straight-line function goes to `torch.compile(backend="neuron", fullgraph=True)`, which the
package torch-neuronx registers. A machine that only compiles sets TORCH_NEURONX_COMPILE_ONLY=1 and calls that once, on
tensors without contents: the backend then compiles and runs nothing. What it compiles stays in its own cache, which is
to be carried along; our executable is the straight-line code that finds it there. Neither path has been run with
torch-neuronx yet.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from vllm_neuron import envs
from vllm_neuron.kernels import opaque
from vllm_neuron.routes import blob, cpu_kernels, native_code, native_program
from vllm_neuron.routes.capture import Captured, Leaf, Signature, capture
from vllm_neuron.routes.compile_only import CompiledOnly, no_device
from vllm_neuron.routes.native_code import FlatStep
from vllm_neuron.routes.native_donation import donate
from vllm_neuron.routes.route import Executable, Placed, Probe, PyTree, Step, Target, is_installed

_LOWERING = ("capture", "cpu_kernels", "native", "native_code", "native_donation", "native_program")

_DEVICE = "neuron"
"""torch's name of Neuron devices."""

_BACKEND = "neuron"
"""The backend of torch.compile for them."""


@dataclass(frozen=True, eq=False)
class PlacedWeights:
    """Weights by their path in the tree they came in."""

    by_path: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class PlacedCache:
    """Keys and values of each layer in turn. Executables update them in place."""

    tensors: tuple[torch.Tensor, ...]


@dataclass
class NativeExecutable:
    """A compiled step; see `Executable`."""

    name: str
    signature: Signature
    source: str
    platform: str
    _step: FlatStep = field(init=False, repr=False)
    _weights: tuple[Placed, tuple[torch.Tensor, ...]] = field(init=False, repr=False, default=(None, ()))
    _cache: Placed = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._step = _function(self.source, self.platform, self.signature)
        self._shapes = [leaf.shape for leaf in self.signature.inputs]

    def __call__(self, weights: Placed, kv_cache: Placed, inputs: PyTree) -> tuple[PyTree, Placed]:
        if weights is not self._weights[0]:
            self._weights = weights, self._bind(weights)
        if kv_cache is not self._cache:
            _check_forms(self.name, self.signature.kv_cache, kv_cache.tensors)
            self._cache = kv_cache
        leaves = pytree.tree_leaves(inputs)
        if [leaf.shape for leaf in leaves] != self._shapes:
            _check_forms(self.name, self.signature.inputs, leaves)
        if self.platform != "cpu":
            leaves = [leaf.to(_DEVICE) for leaf in leaves]
        with torch.no_grad():
            outputs = self._step(self._weights[1], kv_cache.tensors, leaves)
        if self.platform != "cpu":
            outputs = tuple(output.cpu() for output in outputs)
        return pytree.tree_unflatten(outputs, self.signature.outputs), kv_cache

    def save(self) -> bytes:
        return _pack(self.name, self.signature, self.source, self.platform)

    def _bind(self, weights: PlacedWeights) -> tuple[torch.Tensor, ...]:
        """The graph's weights in its order."""
        missing = [leaf.path for leaf in self.signature.weights if leaf.path not in weights.by_path]
        if missing:
            raise ValueError(f"{self.name}: no weight {', '.join(missing)}")
        bound = tuple(weights.by_path[leaf.path] for leaf in self.signature.weights)
        _check_forms(self.name, self.signature.weights, bound)
        return bound


@dataclass(frozen=True)
class NativeLowered:
    """Straight-line code of a step with the KV cache donated; see `Lowered`."""

    name: str
    signature: Signature
    source: str
    target: Target

    def text(self) -> str:
        return f"{self.signature}\n\n{self.source}"

    def arguments(self) -> tuple[str, ...]:
        return tuple(map(str, self.signature.arguments))

    def kernel_packages(self) -> tuple[str, ...]:
        return (*cpu_kernels.packages(self.source), *opaque.sources(self.source))

    def compile(self) -> Executable:
        """Raises RuntimeError if torch-neuronx is needed and is not there."""
        platform = self.target.platform
        if self.target.compile_only:
            _compile_only(self.signature, self.source, platform)
            return CompiledOnly(self.name, platform, _pack(self.name, self.signature, self.source, platform))
        return NativeExecutable(self.name, self.signature, self.source, platform)


@dataclass(frozen=True)
class NativeTraced:
    """FX graph of a step; see `Traced`."""

    name: str
    captured: Captured
    target: Target

    def text(self) -> str:
        signature = self.captured.signature
        return f"{signature}\n\n{_source(self.captured.module.graph, signature, self.target.platform)}"

    def lower(self) -> NativeLowered:
        signature = self.captured.signature
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.captured.module.graph, {}))
        donate(self.name, graph, len(signature.weights), len(signature.kv_cache))
        return NativeLowered(self.name, signature, _source(graph, signature, self.target.platform), self.target)


class NativeRoute:
    """FX to straight-line code on the CPU, or to Neuron's torch backend; see `Route`.

    Args:
        target: what to compile for.
    """

    name = envs.NATIVE
    modules = tuple(f"vllm_neuron.routes.{name}" for name in _LOWERING)

    def __init__(self, target: Target) -> None:
        self.target = target

    def missing(self) -> str | None:
        """torch-neuronx, where it is needed; see `Route`."""
        if self.target.platform == "cpu" or is_installed("torch_neuronx"):
            return None
        return f"the native route needs the package torch-neuronx: {_remedy(self.target.compile_only)}"

    def probe(self) -> Probe:
        """Whether graphs can be compiled: in CPU mode that takes a C++ compiler, else torch-neuronx."""
        if self.target.platform == "cpu":
            fault = cpu_kernels.fault()
            works = f"FX graphs run on the CPU with {cpu_kernels.in_use()}"
        else:
            fault = _neuron_fault(self.target)
            works = f"torch-neuronx compiles for {self.target.platform}"
            works += "; nothing runs here" if self.target.compile_only else ""
        return Probe(fault is None, fault or works, self.versions())

    def versions(self) -> dict[str, str]:
        """Versions of what compiles and runs."""
        return versions(self.target.platform)

    def flags(self) -> tuple[str, ...]:
        """None: Neuron's backend reads its own variables."""
        return ()

    def trace(self, name: str, step: Step, weights: PyTree, kv_cache: PyTree, inputs: PyTree) -> NativeTraced:
        """Capture `step`; raises ValueError if it is not a pure function of shapes (see `capture`)."""
        return NativeTraced(name, capture(name, step, weights, kv_cache, inputs, in_place=True), self.target)

    def load(self, saved: bytes) -> Executable:
        """What `save` of an executable wrote. Raises ValueError if it is not that, or of another target or version."""
        platform = self.target.platform
        name, signature, source = blob.unpack(saved, self.name, platform, self.versions())
        if self.target.compile_only:
            return CompiledOnly(name, platform, saved)
        return NativeExecutable(name, signature, source, platform)

    def place_weights(self, weights: PyTree) -> PlacedWeights:
        """Contiguous weights on the device; on the CPU those that are contiguous already stay where they are."""
        flat, _ = pytree.tree_flatten_with_path(weights)
        device = self._device()
        return PlacedWeights({f"weights{pytree.keystr(path)}": leaf.to(device).contiguous() for path, leaf in flat})

    def allocate_kv_cache(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> PlacedCache:
        """Zeros; keys and values of a layer lie in one piece of memory."""
        device = self._device()
        return PlacedCache(
            tuple(half for shape in shapes for half in torch.zeros((2, *shape), dtype=dtype, device=device).unbind())
        )

    def _device(self) -> torch.device:
        if self.target.compile_only:
            raise no_device(self.target.platform)
        if self.target.platform == "cpu":
            return torch.device("cpu")
        _import_torch_neuronx()
        return torch.device(_DEVICE)


def versions(platform: str) -> dict[str, str]:
    """Versions of the packages a platform's executables depend on; "absent" where one is not installed."""
    return blob.package_versions(("torch",) if platform == "cpu" else ("torch", "torch-neuronx", "neuronx-cc", "nki"))


def _source(graph: torch.fx.Graph, signature: Signature, platform: str) -> str:
    device = "cpu" if platform == "cpu" else _DEVICE
    return native_code.emit(graph, len(signature.weights), len(signature.kv_cache), device)


def _function(source: str, platform: str, signature: Signature) -> FlatStep:
    """The step that a source describes, ready to run on a platform."""
    with_kernels = cpu_kernels.named_in(source)
    if with_kernels:
        cpu_kernels.register()
    if platform != "cpu":
        _import_torch_neuronx()
    if f"torch.ops.{opaque.NAMESPACE}." in source:
        opaque.register(on_device=platform != "cpu")
    if platform == "cpu":
        given = len(signature.weights), len(signature.kv_cache), len(signature.inputs)
        return native_program.load(source, given) if with_kernels else native_code.load(source)
    # Neuron's backend compiles at the first call, and finds what it compiled before in its own cache.
    return torch.compile(native_code.load(source), backend=_BACKEND, fullgraph=True, dynamic=False)


def _compile_only(signature: Signature, source: str, platform: str) -> None:
    """Have Neuron's backend compile a step for devices that are not here."""
    _import_torch_neuronx(compile_for=platform)
    step = _function(source, platform, signature)
    weights, kv_cache, inputs = (
        [torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=_DEVICE) for leaf in leaves]
        for leaves in (signature.weights, signature.kv_cache, signature.inputs)
    )
    with torch.no_grad():
        step(weights, kv_cache, inputs)


def _pack(name: str, signature: Signature, source: str, platform: str) -> bytes:
    return blob.pack(envs.NATIVE, platform, versions(platform), (name, signature, source))


def _check_forms(name: str, expected: Sequence[Leaf], tensors: Sequence[torch.Tensor]) -> None:
    if len(expected) != len(tensors):
        raise ValueError(f"{name}: {len(tensors)} tensors where the graph takes {len(expected)}")
    for leaf, tensor in zip(expected, tensors, strict=True):
        found = Leaf.of(leaf.path, tensor)
        if found != leaf:
            raise ValueError(f"{name}: the graph is compiled for {leaf}, but was given {found}")


def _neuron_fault(target: Target) -> str | None:
    try:
        _import_torch_neuronx(compile_for=target.platform if target.compile_only else None)
    except RuntimeError as error:
        return str(error)
    return None


def _import_torch_neuronx(compile_for: str | None = None) -> None:
    """Register Neuron's device and its torch.compile backend.

    Args:
        compile_for: "trn2" or "trn3" to have it compile for that and run nothing; None for the devices of this machine.

    Raises:
        RuntimeError: torch-neuronx is not there, or is too old to be a backend of torch.compile.
    """
    if compile_for is not None:
        # Looked up when it is imported. The target may have been spelled in a way that only we understand.
        os.environ["TORCH_NEURONX_COMPILE_ONLY"] = "1"
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = compile_for
    remedy = _remedy(compile_for is not None)
    try:
        importlib.import_module("torch_neuronx")
    except ImportError as error:
        raise RuntimeError(f"the native route needs the package torch-neuronx ({error}): {remedy}") from error
    if _BACKEND not in torch._dynamo.list_backends(exclude_tags=()):
        raise RuntimeError(
            f"torch-neuronx {blob.package_version('torch-neuronx')} registers no backend `{_BACKEND}`: {remedy}"
        )


def _remedy(compile_only: bool) -> str:
    instead = "VLLM_NEURON_CPU_MODE=1 to run without Neuron devices"
    if compile_only:
        instead = "VLLM_NEURON_BACKEND=vllm_neuron, whose route compiles with neuronx-cc alone"
    return (
        "install the extra `neuron` from AWS's package index (PyPI's torch-neuronx is an empty placeholder), or set "
        f"{instead}"
    )
