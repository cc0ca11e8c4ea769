"""`vllm-neuron calibrate-kv` on a tiny model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.checkpoints import checkpoint, write_checkpoint
from tests.models.paging import GROUP_BLOCKS, load, new_cache, prefill, shuffled_table
from vllm_neuron.cli.main import app
from vllm_neuron.kv_cache.layout import pool_indexes
from vllm_neuron.weights.kv_scales import read_kv_scales

TEXT = "".join(chr(97 + (7 * i) % 26) for i in range(100))


def calibrate(model: Path, output: Path, text: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["calibrate-kv", str(model), str(output), "--text", str(text), *options])
    return done.exit_code, done.output


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "sample.txt"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize("kind", ["llama", "qwen2-windows"])
def test_scales_are_the_largest_magnitudes_over_448(kind: str, text: Path, tmp_path: Path) -> None:
    source, output = checkpoint(kind), tmp_path / "calibrated"
    code, said = calibrate(source, output, text, "--tokens", "60", "--json")
    assert code == 0, said
    assert json.loads(said[said.index("{") :]) | {"largest": None} == {
        "folder": str(output), "tokens": 60, "layers": len(load(source)[0].kv_layers), "largest": None,
    }  # fmt: skip
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(source)(TEXT)["input_ids"][:60]
    model, weights = load(source)
    _, cache = prefill(model, weights, new_cache(model), ids, shuffled_table(), [60])
    held = [
        [half[GROUP_BLOCKS * layer.group :][:GROUP_BLOCKS] for half in cache[pool]]
        for layer, pool in zip(model.kv_layers, pool_indexes(model.kv_layers), strict=True)
    ]
    wanted = torch.stack([torch.stack([half.abs().max() for half in halves]) for halves in held]) / 448
    scales = read_kv_scales(output, len(model.kv_layers))
    assert scales is not None
    torch.testing.assert_close(scales, wanted, rtol=1e-4, atol=0)


def test_the_result_is_the_checkpoint_plus_scales(text: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", shards=2)
    output = tmp_path / "calibrated"
    code, said = calibrate(source, output, text)
    assert code == 0, said
    declared = json.loads((output / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == "compressed-tensors" and declared["kv_cache_scheme"]["num_bits"] == 8
    assert load_file(output / "kv-scales.safetensors").keys() == {
        f"model.layers.{layer}.self_attn.{name}_scale" for layer in range(2) for name in "kv"
    }
    (_, mine), (_, theirs) = load(output), load(source)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    shard = next(source.glob("model-00001*.safetensors"))
    assert (output / shard.name).samefile(shard), "linked, not copied"
    # Nothing of the source is changed, and a second run has nothing to do.
    assert "quantization_config" not in json.loads((source / "config.json").read_text())
    for model, target, words in (
        (output, tmp_path / "again", "has scales of the KV cache already"),
        (source, output, "is not empty"),
        (tmp_path, tmp_path / "other", "has no config.json"),
    ):
        code, said = calibrate(model, target, text)
        assert code == 1 and words in said, said


def test_an_empty_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    code, said = calibrate(checkpoint("llama"), tmp_path / "calibrated", tmp_path / "empty.txt")
    assert code == 1 and "the sample has no token" in said
    assert not (tmp_path / "calibrated").exists()
