import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.caches import cache_of_the_session
from tests.checkpoints import checkpoint
from tests.server.harness import BACKENDS, Server, serving

UNKNOWN_VARIABLE = "VLLM_NEURON_REMOTE_CACHE"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Compiled graphs are shared by all servers of a session and by nothing else."""
    return cache_of_the_session(tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def tiny() -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def server(backend: str, tiny: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server on the tiny model per route, for all tests that do not harm it."""
    folder = tmp_path_factory.mktemp("server")
    with serving(tiny, backend, folder, cache, env={UNKNOWN_VARIABLE: "x"}) as running:
        yield running


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A new folder; below it there is room for the names of vLLM's sockets, which may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        yield Path(folder)
