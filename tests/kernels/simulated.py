"""For the tests of NKI kernels: they run in the simulator, in its strict mode."""

from collections.abc import Iterator

import pytest

from vllm_neuron.kernels import simulator

assert simulator.install(), "the real nki package is installed: these tests are of kernels in the simulator"


@pytest.fixture(autouse=True, scope="package")
def simulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NKI_SIMULATOR", "1")
        patch.delenv("NKI_PRECISE_FP", raising=False)
        patch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
        yield
