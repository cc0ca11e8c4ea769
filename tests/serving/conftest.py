from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cpu_mode() -> Iterator[None]:
    """vLLM chooses its platform at the first import in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NEURON_CPU_MODE", "1")
        yield
