"""Architectures of other packages: what is found, and what is said of packages that cannot be used."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_neuron.models.errors import ModelPackageError, UnsupportedArchitectureError
from vllm_neuron.models.external import ENTRY_POINT_GROUP, external_architectures
from vllm_neuron.models.registry import build_model

GOOD = """
from vllm_neuron.models.model import Model

def build(hf_config, max_model_len):
    return Model("NewForCausalLM", 10, 4, {}, {}, (), len, len)
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a package of one module, with one entry point."""

    def make(package: str, source: str, architecture: str = "NewForCausalLM") -> None:
        (tmp_path / f"{package}.py").write_text(source)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{architecture} = {package}:build\n")

    monkeypatch.syspath_prepend(tmp_path)
    return make


def build(*architectures: str) -> object:
    return build_model(SimpleNamespace(architectures=list(architectures)))


def test_a_package_is_imported_only_for_its_own_architecture(install: Install) -> None:
    install("imported_never", "raise SystemExit('imported')")
    assert "NewForCausalLM" in external_architectures()
    with pytest.raises(UnsupportedArchitectureError, match="NewForCausalLM"):
        build("OtherForCausalLM")


def test_the_first_architecture_that_is_there_counts(install: Install) -> None:
    install("good_model", GOOD)
    assert build("OtherForCausalLM", "NewForCausalLM").architecture == "NewForCausalLM"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all", r"declared by broken_\d 1.0 as broken_\d:build.*ModuleNotFoundError"),
        ("", r"cannot be imported: AttributeError"),
        ("def build(hf_config, max_model_len): return 3", r"gave a int for NewForCausalLM.*must return"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(install: Install, source: str, message: str) -> None:
    install(f"broken_{len(source) % 10}", source)
    with pytest.raises(ModelPackageError, match=message):
        build("NewForCausalLM")


def test_two_packages_of_one_architecture_are_named(install: Install) -> None:
    install("first_package", GOOD)
    install("second_package", GOOD)
    with pytest.raises(ModelPackageError, match=r"several packages: first_package 1.0, second_package 1.0"):
        build("NewForCausalLM")


def test_a_package_cannot_replace_a_model_of_ours(install: Install) -> None:
    install("another_llama", GOOD, "LlamaForCausalLM")
    with pytest.raises(ModelPackageError, match=r"another_llama:build, but it is built in"):
        build("LlamaForCausalLM")
