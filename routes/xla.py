"""The XLA route (deprecated): torch_xla lowers a captured step to StableHLO, and a PJRT client compiles and runs it.

In CPU mode the client is jaxlib's for the CPU. On Neuron devices it is the PJRT plugin of libneuronxla, which hands the
StableHLO to neuronx-cc; that has not been run on hardware. Executables are called directly: nothing is traced after
compilation, and a process that finds all its executables saved never imports torch_xla.

A machine that only compiles has no client: it runs `neuronx-cc` on the HLO module itself, with the same flags, and
keeps the NEFF. Loading such a NEFF on a device is not supported yet: PJRT has no documented way to do it.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from vllm_neuron import envs
from vllm_neuron.kernels import opaque
from vllm_neuron.routes import blob, cpu_kernels, neuronx_cc, xla_kernels
from vllm_neuron.routes.capture import Captured, Leaf, capture
from vllm_neuron.routes.compile_only import CompiledOnly, no_device
from vllm_neuron.routes.route import Executable, Placed, Probe, PyTree, Step, Target, is_installed
from vllm_neuron.routes.xla_cpu import BITS
from vllm_neuron.routes.xla_lower import StableHLO, lower
from vllm_neuron.routes.xla_pjrt import Array, Client, Program

_CPU_PACKAGES = {"torch_xla": "torch-xla==2.9.0", "jax": "jax==0.10.2", "jaxlib": "jaxlib==0.10.2"}
_NEURON_PACKAGES = {"libneuronxla": "libneuronxla", "neuronxcc": "neuronx-cc"}
_LOWERING = (
    "capture",
    "cpu_kernels",
    "neuronx_cc",
    "xla",
    "xla_cpu",
    "xla_interpreter",
    "xla_kernels",
    "xla_lower",
    "xla_pjrt",
)


@dataclass(frozen=True)
class ProgramSignature:
    """How the parameters and results of a program relate to weights, KV cache, inputs and outputs.

    Attributes:
        weights: path of each weight in the tree of weights.
        parameters: what each parameter of the program is: an index into the weights, the flat KV cache and the flat
            inputs, one after the other.
        num_outputs: results that come before the new KV cache.
        outputs: tree of the outputs.
        kernels: namespaces of the kernels that the program calls, with one space between them.
    """

    weights: tuple[str, ...]
    parameters: tuple[int, ...]
    num_outputs: int
    outputs: pytree.TreeSpec
    kernels: str


@dataclass(frozen=True)
class Neff:
    """A program as neuronx-cc wrote it, where an executable otherwise holds what a PJRT client has saved."""

    content: bytes


@dataclass(frozen=True)
class XlaExecutable:
    """A compiled step; see `Executable`. Weights are a mapping of paths to arrays, a KV cache is a flat tuple."""

    name: str
    signature: ProgramSignature
    platform: str
    client: Client
    program: Program

    def __call__(self, weights: Placed, kv_cache: Placed, inputs: PyTree) -> tuple[PyTree, Placed]:
        signature = self.signature
        arguments = [weights[path] for path in signature.weights]
        arguments += kv_cache
        arguments += [self.client.put(leaf) for leaf in pytree.tree_leaves(inputs)]
        results = self.program([arguments[index] for index in signature.parameters])
        xla_kernels.raise_failure(signature.kernels)
        outputs = [self.client.fetch(array) for array in results[: signature.num_outputs]]
        return pytree.tree_unflatten(outputs, signature.outputs), tuple(results[signature.num_outputs :])

    def save(self) -> bytes:
        return _pack(self.name, self.signature, self.platform, self.program.save())


@dataclass(frozen=True)
class XlaLowered:
    """StableHLO of a step; see `Lowered`."""

    name: str
    stablehlo: StableHLO
    signature: ProgramSignature
    leaves: tuple[Leaf, ...]
    target: Target

    def text(self) -> str:
        return self.stablehlo.text

    def arguments(self) -> tuple[str, ...]:
        return tuple(map(str, self.leaves))

    def kernel_packages(self) -> tuple[str, ...]:
        return (*cpu_kernels.packages(self.stablehlo.text), *opaque.sources(self.stablehlo.text))

    def compile(self) -> Executable:
        """Raises CompilerError if neuronx-cc fails."""
        platform = self.target.platform
        if self.target.compile_only:
            neff = Neff(neuronx_cc.compile_hlo(self.name, self.stablehlo.hlo, platform))
            return CompiledOnly(self.name, platform, _pack(self.name, self.signature, platform, neff))
        client = _client(platform)
        xla_kernels.register(self.signature.kernels)
        with nullcontext() if platform == "cpu" else neuronx_cc.flags_in_environment(platform):
            program = client.compile(self.stablehlo.text)
        return XlaExecutable(self.name, self.signature, platform, client, program)


@dataclass(frozen=True)
class XlaTraced:
    """ATen graph of a step; see `Traced`."""

    name: str
    captured: Captured
    target: Target

    def text(self) -> str:
        return self.captured.module.print_readable(print_output=False)

    def lower(self) -> XlaLowered:
        stablehlo = lower(self.name, self.captured, self.target.platform)
        captured = self.captured.signature
        signature = ProgramSignature(
            tuple(leaf.path for leaf in captured.weights),
            stablehlo.parameters,
            captured.outputs.num_leaves,
            captured.outputs,
            " ".join(name for name in xla_kernels.NAMESPACES if name in stablehlo.text),
        )
        return XlaLowered(self.name, stablehlo, signature, captured.arguments, self.target)


class XlaRoute:
    """torch_xla to StableHLO to a PJRT client, or to HLO to neuronx-cc; see `Route`.

    Args:
        target: what to compile for.
    """

    name = envs.XLA
    modules = tuple(f"vllm_neuron.routes.{name}" for name in _LOWERING)

    def __init__(self, target: Target) -> None:
        self.target = target

    def missing(self) -> str | None:
        """Packages that lower, and on devices run; see `Route`."""
        on_device = self.target.platform != "cpu" and not self.target.compile_only
        needed = {**_CPU_PACKAGES, **_NEURON_PACKAGES} if on_device else _CPU_PACKAGES
        names = [pip for module, pip in needed.items() if not is_installed(module)]
        if not names:
            return None
        reason = f"the XLA route needs {', '.join(names)}: pip install {' '.join(names)}"
        if set(names) & set(_NEURON_PACKAGES.values()):
            return f"{reason} (from AWS's package index), or set VLLM_NEURON_CPU_MODE=1 to run without Neuron devices"
        return f"{reason}, or unset VLLM_NEURON_BACKEND"

    def probe(self) -> Probe:
        """Whether the packages are there, and the device or the compiler answers."""
        missing = self.missing()
        if missing is not None:
            return Probe(False, missing, self.versions())
        return self._probe_compiler() if self.target.compile_only else self._probe_client()

    def _probe_compiler(self) -> Probe:
        fault = neuronx_cc.fault()
        works = f"torch_xla lowers, {neuronx_cc.find()} compiles for {self.target.platform}; nothing runs here"
        return Probe(fault is None, fault or works, self.versions())

    def _probe_client(self) -> Probe:
        try:
            _client(self.target.platform)
        except (ImportError, RuntimeError) as error:
            return Probe(False, f"no PJRT client for {self.target.platform}: {error}", self.versions())
        if self.target.platform != "cpu":
            return Probe(True, f"torch_xla lowers, PJRT runs on {self.target.platform}", self.versions())
        fault = cpu_kernels.fault()
        works = f"torch_xla lowers, PJRT runs on the CPU with {cpu_kernels.in_use()}"
        return Probe(fault is None, fault or works, self.versions())

    def versions(self) -> dict[str, str]:
        """Versions of what lowers, compiles and loads."""
        return versions(self.target.platform)

    def flags(self) -> tuple[str, ...]:
        """neuronx-cc's; XLA's CPU compiler has none.

        Raises:
            CompilerError: NEURON_LOGICAL_NC_CONFIG has a bad value.
        """
        return () if self.target.platform == "cpu" else neuronx_cc.flags(self.target.platform)

    def trace(self, name: str, step: Step, weights: PyTree, kv_cache: PyTree, inputs: PyTree) -> XlaTraced:
        """Capture `step`; raises ValueError if it is not a pure function of shapes (see `capture`)."""
        return XlaTraced(name, capture(name, step, weights, kv_cache, inputs), self.target)

    def load(self, saved: bytes) -> Executable:
        """What `save` of an executable wrote.

        Raises:
            ValueError: it is not that, or is of another target or other versions.
            RuntimeError: it is a NEFF, and this machine would have to run it.
        """
        platform = self.target.platform
        name, signature, program = blob.unpack(saved, self.name, platform, self.versions())
        if self.target.compile_only:
            return CompiledOnly(name, platform, saved)
        if isinstance(program, Neff):
            raise RuntimeError(
                f"not supported yet: running {name} as compiled by neuronx-cc on a machine without devices. Remove it "
                "with vllm-neuron cache rm and from NEURON_COMPILED_ARTIFACTS and NEURON_LIBTORCH_REMOTE_CACHE, or "
                "unset these; then it is compiled here."
            )
        client = _client(platform)
        xla_kernels.register(signature.kernels)
        return XlaExecutable(name, signature, platform, client, client.load(program))

    def place_weights(self, weights: PyTree) -> Mapping[str, Array]:
        """Arrays by path. On the CPU they share the memory of tensors that are contiguous and aligned."""
        client = self._require_client()
        leaves, _ = pytree.tree_flatten_with_path(weights)
        return {f"weights{pytree.keystr(path)}": client.put(tensor) for path, tensor in leaves}

    def allocate_kv_cache(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Array, ...]:
        """Keys and values of each layer in turn, zeroed, on the CPU as integers; their memory is the client's own."""
        client = self._require_client()
        held = BITS[dtype.itemsize] if self.target.platform == "cpu" else dtype
        zeros = {shape: client.zeros_program(shape, held) for shape in set(shapes)}
        return tuple(zeros[shape]([])[0] for shape in shapes for _ in ("keys", "values"))

    def _require_client(self) -> Client:
        if self.target.compile_only:
            raise no_device(self.target.platform)
        return _client(self.target.platform)


def versions(platform: str) -> dict[str, str]:
    """Versions of what a platform's executables depend on; "absent" where something is not installed."""
    found = blob.package_versions(("torch", "torch-xla", "jax", "jaxlib"))
    if platform != "cpu":
        found |= {**blob.package_versions(("libneuronxla", "nki")), neuronx_cc.PACKAGE: neuronx_cc.version()}
    return found


def _client(platform: str) -> Client:
    """The PJRT client, which has one name for all kinds of Neuron devices."""
    return Client.get("cpu" if platform == "cpu" else "neuron")


def _pack(name: str, signature: ProgramSignature, platform: str, program: bytes | Neff) -> bytes:
    return blob.pack(envs.XLA, platform, versions(platform), (name, signature, program))
