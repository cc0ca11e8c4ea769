"""What compiling yields on a machine that has no device: an executable to save, not to run."""

from dataclasses import dataclass
from typing import NoReturn

from vllm_neuron.routes.route import Placed, PyTree


@dataclass(frozen=True)
class CompiledOnly:
    """A step compiled for devices of another machine; see `Executable`.

    Attributes:
        name: of the graph.
        platform: what it is compiled for, "trn2" or "trn3".
        saved: what `save` returns.
    """

    name: str
    platform: str
    saved: bytes

    def __call__(self, weights: Placed, kv_cache: Placed, inputs: PyTree) -> NoReturn:
        """Refused: there is nothing to run it on."""
        raise RuntimeError(
            f"{self.name} is compiled for {self.platform}, and this machine only compiles "
            f"(VLLM_NEURON_CPU_COMPILE=1). Take the compiled graphs to a {self.platform} instance to run them."
        )

    def save(self) -> bytes:
        """What the route's `load` takes on a machine with devices."""
        return self.saved


def no_device(platform: str) -> RuntimeError:
    """The error of whatever needs a device."""
    return RuntimeError(
        f"There is no device here: VLLM_NEURON_CPU_COMPILE=1 only compiles for {platform}. Unset it to run."
    )
