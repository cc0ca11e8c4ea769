"""The XLA route (deprecated): torch_xla lowers a captured step to StableHLO, and a PJRT client compiles and runs it.

In CPU mode the client is jaxlib's for the CPU. On Neuron devices it is the PJRT plugin of libneuronxla, which hands the
same StableHLO to neuronx-cc; that has not been run on hardware. Executables are called directly: nothing is traced
after compilation, and a process that finds all its executables saved never imports torch_xla.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from vllm_neuron import envs
from vllm_neuron.routes import blob
from vllm_neuron.routes.capture import Captured, capture
from vllm_neuron.routes.route import Placed, Probe, PyTree, Step
from vllm_neuron.routes.xla_lower import BITS, StableHLO, lower
from vllm_neuron.routes.xla_pjrt import Array, Client, Program

_CPU_PACKAGES = {"torch_xla": "torch-xla==2.9.0", "jax": "jax==0.10.2", "jaxlib": "jaxlib==0.10.2"}
_NEURON_PACKAGES = {"libneuronxla": "libneuronxla", "neuronxcc": "neuronx-cc"}


@dataclass(frozen=True)
class ProgramSignature:
    """How the parameters and results of a program relate to weights, KV cache, inputs and outputs.

    Attributes:
        weights: path of each weight in the tree of weights.
        parameters: what each parameter of the program is: an index into the weights, the flat KV cache and the flat
            inputs, one after the other.
        num_outputs: results that come before the new KV cache.
        outputs: tree of the outputs.
    """

    weights: tuple[str, ...]
    parameters: tuple[int, ...]
    num_outputs: int
    outputs: pytree.TreeSpec


@dataclass(frozen=True)
class XlaExecutable:
    """A compiled step; see `Executable`. Weights are a mapping of paths to arrays, a KV cache is a flat tuple."""

    name: str
    signature: ProgramSignature
    client: Client
    program: Program

    def __call__(self, weights: Placed, kv_cache: Placed, inputs: PyTree) -> tuple[PyTree, Placed]:
        signature = self.signature
        arguments = [weights[path] for path in signature.weights]
        arguments += kv_cache
        arguments += [self.client.put(leaf) for leaf in pytree.tree_leaves(inputs)]
        results = self.program([arguments[index] for index in signature.parameters])
        outputs = [self.client.fetch(array) for array in results[: signature.num_outputs]]
        return pytree.tree_unflatten(outputs, signature.outputs), tuple(results[signature.num_outputs :])

    def save(self) -> bytes:
        body = (self.name, self.signature, self.program.save())
        return blob.pack(envs.XLA, self.client.platform, versions(self.client.platform), body)


@dataclass(frozen=True)
class XlaLowered:
    """StableHLO of a step; see `Lowered`."""

    name: str
    stablehlo: StableHLO
    signature: ProgramSignature
    platform: str

    def text(self) -> str:
        return self.stablehlo.text

    def compile(self) -> XlaExecutable:
        client = Client.get(self.platform)
        return XlaExecutable(self.name, self.signature, client, client.compile(self.stablehlo.text))


@dataclass(frozen=True)
class XlaTraced:
    """ATen graph of a step; see `Traced`."""

    name: str
    captured: Captured
    platform: str

    def text(self) -> str:
        return self.captured.module.print_readable(print_output=False)

    def lower(self) -> XlaLowered:
        stablehlo = lower(self.name, self.captured)
        captured = self.captured.signature
        signature = ProgramSignature(
            tuple(leaf.path for leaf in captured.weights),
            stablehlo.parameters,
            captured.outputs.num_leaves,
            captured.outputs,
        )
        return XlaLowered(self.name, stablehlo, signature, self.platform)


class XlaRoute:
    """torch_xla to StableHLO to a PJRT client; see `Route`.

    Args:
        cpu_mode: run on the CPU instead of Neuron devices.
    """

    name = envs.XLA

    def __init__(self, cpu_mode: bool) -> None:
        self._platform = "cpu" if cpu_mode else "neuron"

    def probe(self) -> Probe:
        """Whether the packages are there and the device answers."""
        needed = _CPU_PACKAGES if self._platform == "cpu" else {**_CPU_PACKAGES, **_NEURON_PACKAGES}
        missing = [pip for module, pip in needed.items() if importlib.util.find_spec(module) is None]
        if missing:
            reason = f"the XLA route needs {', '.join(missing)}: pip install {' '.join(missing)}"
            if set(missing) & set(_NEURON_PACKAGES.values()):
                reason += " (from AWS's package index), or set VLLM_NEURON_CPU_MODE=1 to run without Neuron devices"
            return Probe(False, reason, self.versions())
        try:
            Client.get(self._platform)
        except (ImportError, RuntimeError) as error:
            return Probe(False, f"no PJRT client for {self._platform}: {error}", self.versions())
        return Probe(True, f"torch_xla lowers, PJRT runs on {self._platform}", self.versions())

    def versions(self) -> dict[str, str]:
        """Versions of what lowers, compiles and loads."""
        return versions(self._platform)

    def trace(self, name: str, step: Step, weights: PyTree, kv_cache: PyTree, inputs: PyTree) -> XlaTraced:
        """Capture `step`; raises ValueError if it is not a pure function of shapes (see `capture`)."""
        return XlaTraced(name, capture(name, step, weights, kv_cache, inputs), self._platform)

    def load(self, saved: bytes) -> XlaExecutable:
        """What `XlaExecutable.save` wrote. Raises ValueError if it is not that, or is of other versions."""
        name, signature, program = blob.unpack(saved, self.name, self._platform, self.versions())
        client = Client.get(self._platform)
        return XlaExecutable(name, signature, client, client.load(program))

    def place_weights(self, weights: PyTree) -> Mapping[str, Array]:
        """Arrays by path. On the CPU they share the memory of tensors that are contiguous and aligned."""
        client = Client.get(self._platform)
        leaves, _ = pytree.tree_flatten_with_path(weights)
        return {f"weights{pytree.keystr(path)}": client.put(tensor) for path, tensor in leaves}

    def allocate_kv_cache(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Array, ...]:
        """Keys and values of each layer in turn, as integers that are zero; their memory is the client's own."""
        client = Client.get(self._platform)
        zeros = {shape: client.zeros_program(shape, BITS[dtype.itemsize]) for shape in set(shapes)}
        return tuple(zeros[shape]([])[0] for shape in shapes for _ in ("keys", "values"))


def versions(platform: str) -> dict[str, str]:
    """Versions of the packages a platform's executables depend on; "absent" where one is not installed."""
    neuron = ("libneuronxla", "neuronx-cc") if platform == "neuron" else ()
    return blob.package_versions(("torch", "torch-xla", "jax", "jaxlib", *neuron))
