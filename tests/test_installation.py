"""A wheel of this project, installed apart from the checkout: commands, entry points, requirements, a first answer."""

import os
import re
import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.caches import new_cache
from tests.checkpoints import checkpoint, greedy_oracle
from vllm_neuron import __version__
from vllm_neuron.routes.xla import _CPU_PACKAGES

REPOSITORY = Path(__file__).parents[1]
SOURCES = ("src", "routes", "kernels", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel, and nothing else, is installed into."""
    folder = tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / "source" / name)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*PIP, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


@pytest.fixture(scope="module")
def metadata(installed: Path) -> Message:
    (path,) = installed.glob("vllm_neuron-*.dist-info/METADATA")
    return Parser().parsestr(path.read_text())


def run(installed: Path, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run with the installed package in place of the checkout's, and none of our variables but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "NEURON_"))}
    environment = {**kept, "PYTHONPATH": str(installed), **variables}
    return subprocess.run(
        [str(word) for word in command], cwd=installed, env=environment, capture_output=True, text=True, timeout=240
    )


def test_the_command_tells_its_version(installed: Path, metadata: Message) -> None:
    done = run(installed, installed / "bin" / "vllm-neuron", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, __version__), done.stderr
    assert metadata["Version"] == __version__


def test_the_doctor_finds_the_routes_of_cpu_mode(installed: Path) -> None:
    done = run(installed, installed / "bin" / "vllm-neuron", "doctor", VLLM_NEURON_CPU_MODE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM uses this plugin: yes (mode: cpu)" in done.stdout
    assert "The selected route works here." in done.stdout


def test_vllm_and_the_shell_find_their_entry_points(installed: Path) -> None:
    (path,) = installed.glob("vllm_neuron-*.dist-info/entry_points.txt")
    text = path.read_text()
    assert "[vllm.platform_plugins]\nneuron = vllm_neuron:register\n" in text
    assert "[console_scripts]\nvllm-neuron = vllm_neuron.cli.main:main\n" in text


def test_requirements_are_met_here_and_explained_in_the_readme(metadata: Message) -> None:
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    needed = {one.name.replace("_", "-"): one.specifier for one in required if one.marker is None}
    readme = (REPOSITORY / "README.md").read_text()
    (paragraph,) = re.findall(r"^Dependencies besides vLLM and torch: .*?\n\n", readme, re.MULTILINE | re.DOTALL)
    explained = {name.replace("_", "-") for name in re.findall(r"`([\w-]+)`", paragraph.partition("For the demo")[0])}
    assert explained == needed.keys() - {"vllm", "torch"}
    assert str(needed["vllm"]) == "==0.16.0", "the versions that vllm_neuron.plugin.activation accepts"
    pins = {name: str(specifier) for name, specifier in needed.items()}
    for pinned in _CPU_PACKAGES.values():
        name, _, version = pinned.partition("==")
        assert pins[name] == f"=={version}", "what a missing package's message says to install"


def test_neurons_own_packages_are_an_extra(metadata: Message) -> None:
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    extra = {one.name for one in required if one.marker and one.marker.evaluate({"extra": "neuron"})}
    assert extra == {"torch-neuronx", "neuronx-cc", "nki"}
    assert not extra & {one.name for one in required if one.marker is None}


FIRST_ANSWER = """
import sys

sys.modules |= dict.fromkeys(("torch_xla", "jax", "jaxlib", "torch_neuronx", "neuronxcc", "nki"))
from vllm import LLM, SamplingParams
import vllm_neuron

llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=1, num_gpu_blocks_override=20)
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy, use_tqdm=False)
print(vllm_neuron.__file__, *output.outputs[0].token_ids, sep="\\n")
"""


def test_real_first_answer_without_the_packages_of_the_other_route(installed: Path, tmp_path: Path) -> None:
    path = checkpoint("llama")
    variables = {
        "VLLM_NEURON_CPU_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(new_cache(tmp_path / "cache")),
    }
    done = run(installed, sys.executable, "-c", FIRST_ANSWER, path, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, file, first, second, third, fourth = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed)
    assert [int(first), int(second), int(third), int(fourth)] == greedy_oracle(path, [5, 6, 7], 4)
