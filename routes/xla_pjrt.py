"""A PJRT client through jaxlib: compiles StableHLO, saves and loads what it compiled, and holds arrays.

torch_xla's own CPU client cannot load a compiled program again, and is slow in half precision.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

Array = Any
"""A jax array on the client's one device."""

_FLOATS = {
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
}


class Client:
    """One device and what runs on it. `Client.get` shares one per platform and process."""

    def __init__(self, platform: str) -> None:
        """
        Args:
            platform: PJRT's name of it, "cpu" or "neuron".

        Raises:
            ImportError: a package is missing.
            RuntimeError: there is no such device.
        """
        try:
            import jax
            from jaxlib import _jax, xla_client
        except ImportError as error:
            raise ImportError(
                "the XLA route (VLLM_NEURON_BACKEND=vllm_neuron) needs jax: pip install jax==0.10.2 jaxlib==0.10.2, "
                "or unset VLLM_NEURON_BACKEND to use the native route"
            ) from error
        # Otherwise jax looks for every accelerator it knows, and speaks about those it does not find.
        jax.config.update("jax_platforms", platform)
        self.platform = platform
        self.device = jax.devices(platform)[0]
        self._jax, self._xla_client = _jax, xla_client
        self._devices = _jax.DeviceList((self.device,))

    @staticmethod
    @cache
    def get(platform: str) -> "Client":
        """The client of a platform, made when first asked for."""
        return Client(platform)

    def compile(self, text: str) -> "Program":
        """Compile a StableHLO module for the device."""
        return Program(self, self.device.client.compile_and_load(text, self._devices, self._options()))

    def load(self, serialized: bytes) -> "Program":
        """What `Program.save` returned, possibly in another process."""
        client = self.device.client
        return Program(self, client.deserialize_executable(serialized, self._devices, self._options()))

    def zeros_program(self, shape: Sequence[int], dtype: torch.dtype) -> "Program":
        """A program without parameters that returns a zeroed array of an integer or floating-point dtype."""
        tensor = f"tensor<{'x'.join(map(str, shape))}x{_FLOATS.get(dtype, f'i{dtype.itemsize * 8}')}>"
        zero = "0.0" if dtype in _FLOATS else "0"
        return self.compile(
            f"module @zeros {{ func.func public @main() -> {tensor} {{\n"
            f"%0 = stablehlo.constant dense<{zero}> : {tensor}\n return %0 : {tensor} }} }}"
        )

    def _options(self) -> Any:
        options = self._xla_client.CompileOptions()
        options.num_replicas = options.num_partitions = 1
        return options

    def put(self, tensor: torch.Tensor) -> Array:
        """An array with the contents of a CPU tensor. On the CPU it shares memory that is aligned and contiguous."""
        if self.platform != "cpu":
            import jax

            return jax.device_put(jax.dlpack.from_dlpack(tensor.contiguous()), self.device)
        capsule = torch.utils.dlpack.to_dlpack(tensor.contiguous())
        return self._jax.dlpack_managed_tensor_to_buffer(capsule, self.device, None)

    def fetch(self, array: Array) -> torch.Tensor:
        """A CPU tensor with the contents of an array; on the CPU it shares its memory."""
        if self.platform != "cpu":
            import jax

            array = jax.device_put(array, jax.devices("cpu")[0])
        return torch.from_dlpack(array)


class Program:
    """A compiled program on a client's device."""

    def __init__(self, client: Client, executable: Any) -> None:
        self._client, self._executable = client, executable

    def __call__(self, arguments: Sequence[Array]) -> list[Array]:
        """Run to the end. Donated arguments are invalid afterwards."""
        results = self._executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        arrays = [shards[0] for shards in results]
        self._client._jax.batched_block_until_ready(arrays)
        return arrays

    def temporary_bytes(self) -> int:
        """Memory that a run takes besides its arguments and results."""
        return self._executable.get_compiled_memory_stats().temp_size_in_bytes

    def save(self) -> bytes:
        """The program in a form that `Client.load` of the same version takes on a machine with the same processor."""
        return self._executable.serialize()
