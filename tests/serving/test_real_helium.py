"""The worked example of docs/onboarding-models.md: an architecture from a package of its own, served on both routes."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import HeliumConfig

from tests import checkpoints
from tests.checkpoints import greedy_oracle, make_model, write_checkpoint
from tests.serving.engine import BACKENDS, generate, prompt, running_llm, statistics

EXAMPLE = Path(__file__).parents[2] / "examples" / "helium"
TINY_HELIUM = {"head_dim": 16, "rope_theta": 100000.0, "rms_norm_eps": 1e-8}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example's package, installed by pip where this process finds it, and nothing else does."""
    folder = tmp_path_factory.mktemp("example")
    # A copy, because building leaves its files beside the sources.
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", folder / "site"]
    subprocess.run([*pip, *options, source], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoints.KINDS, "helium", (HeliumConfig, TINY_HELIUM))
        patch.syspath_prepend(folder / "site")
        yield


@pytest.fixture(scope="module")
def helium(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("helium"), "helium")


def test_example_is_short() -> None:
    files = [path for path in EXAMPLE.iterdir() if path.is_file()]
    assert sum(len(path.read_text().splitlines()) for path in files) < 150


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_greedy_tokens_of_the_example_equal_those_of_transformers(helium: Path, backend: str) -> None:
    buckets = {"neuron_config": {"num_batched_tokens_buckets": [256], "num_seqs_buckets": [4]}}
    with running_llm(helium, backend, additional_config=buckets) as llm:
        config = llm.llm_engine.vllm_config.model_config
        assert config.architecture == "HeliumForCausalLM" and not config.using_transformers_backend()
        prompts = [prompt(length, seed=length) for length in (5, 130, 300)]
        assert generate(llm, prompts, 24) == [greedy_oracle(helium, p, 24) for p in prompts]
        assert statistics(llm)["compiles_after_warmup"] == 0


def test_example_declares_every_weight_of_the_checkpoint_once(installed: None) -> None:
    from vllm_neuron_helium import build

    model = make_model("helium")
    table = build(model.config, None).weight_table
    sources = [source for spec in table.values() for source in spec.sources]
    assert sorted(sources) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("changed", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_example_refuses_what_it_does_not_have(installed: None, changed: dict[str, object]) -> None:
    from vllm_neuron.models.errors import UnsupportedModelError
    from vllm_neuron.models.registry import build_model

    config = HeliumConfig(architectures=["HeliumForCausalLM"], **changed)
    with pytest.raises(UnsupportedModelError, match="without biases"):
        build_model(config)


def test_an_installed_architecture_is_listed_where_another_is_refused(installed: None) -> None:
    from vllm_neuron.models.errors import UnsupportedArchitectureError
    from vllm_neuron.models.registry import build_model

    with pytest.raises(UnsupportedArchitectureError, match=r"HeliumForCausalLM, LlamaForCausalLM.*onboarding-models"):
        build_model(SimpleNamespace(architectures=["OtherForCausalLM"]))
