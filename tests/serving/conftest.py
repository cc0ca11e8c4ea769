from collections.abc import Iterator

import pytest

from tests.caches import cache_of_the_session


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """CPU mode, and compiled graphs that are shared between the tests of a session and with nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        # vLLM chooses its platform at the first import in a process.
        patch.setenv("VLLM_NEURON_CPU_MODE", "1")
        patch.setenv("VLLM_CACHE_ROOT", str(cache_of_the_session(tmp_path_factory, worker_id)))
        yield
