"""`vllm-neuron validate` on the graphs that serve, with and without an error planted in the checkpoint."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.caches import new_cache
from tests.checkpoints import write_checkpoint
from vllm_neuron import envs
from vllm_neuron.accuracy.prompts import PROMPTS
from vllm_neuron.cli.main import app

# The platform is chosen at the first import of vLLM in a process.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("VLLM_NEURON_CPU_MODE", "1")
    import vllm.platforms

    assert vllm.platforms.current_platform.is_out_of_tree()

PLANTED, LAYERS = 1, ["layer 0", "layer 1", "layer 2"]
FLAGS = ("--dtype", "bfloat16", "--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "32")
BUCKETS = '{"neuron_config": {"num_batched_tokens_buckets": [32], "on_device_sampling_config": {}}}'


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sound"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with the rows of one layer's query heads in the order of another convention of rotary embeddings."""
    folder = write_checkpoint(tmp_path_factory.mktemp("planted"), num_hidden_layers=3)
    weights = load_file(folder / "model.safetensors")
    name = f"model.layers.{PLANTED}.self_attn.q_proj.weight"
    rows, columns = weights[name].shape
    weights[name] = weights[name].view(4, 2, rows // 8, columns).transpose(1, 2).reshape(rows, columns).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_cache(tmp_path_factory.mktemp("validate-cache"))


@pytest.fixture(autouse=True)
def _environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU mode with the torch form of every operation, which spares building kernels."""
    monkeypatch.delenv("VLLM_NEURON_BACKEND", raising=False)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache))


def run(*arguments: object) -> Result:
    command = ["validate", *map(str, arguments), *FLAGS, "--additional-config", BUCKETS]
    return CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.mark.parametrize("backend", envs.BACKENDS)
def test_real_graphs_pass_on_either_route(sound: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a step, more prompts than a batch, in a configuration that samples in the graphs."""
    monkeypatch.setenv("VLLM_NEURON_BACKEND", backend)
    result = run(sound, "--tokens", 12, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["model"]
    assert found["passed"] and (found["dtype"], found["truth_dtype"]) == ("bfloat16", "float32")
    assert [stage["stage"] for stage in found["stages"]] == ["embedding", *LAYERS, "final norm", "logits"]
    assert found["positions"] == len(found["error_by_position"]) + sum(len(text) + 12 for text in PROMPTS[1:])
    assert found["errors"]["rms"] < 2 * found["noise"]["rms"]


def test_real_planted_error_is_placed(sound: Path, planted: Path) -> None:
    result = run(planted, "--tokens", 12, "--against", sound, "--json")
    assert result.exit_code == 3, result.output
    place = json.loads(result.stdout)["model"]["layer"]
    assert place["excess"]["stage"] == LAYERS[PLANTED] and (place["prompt"], place["position"]) == (0, 1)


def test_real_faults_are_named_before_anything_runs(sound: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("x" * 120 + "\n")
    result = run(sound, "--prompts", prompts, "--tokens", 12)
    assert result.exit_code == 1 and "--max-model-len=128: the longest prompt and its continuation are" in result.output
    result = run(sound, "--against", tmp_path, "--tokens", 4)
    assert result.exit_code == 1 and "transformers does not read" in result.output
