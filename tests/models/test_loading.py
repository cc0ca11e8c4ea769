"""Reading checkpoints: dtypes, shards, fusion, and everything that can be wrong with one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import checkpoint, write_checkpoint
from vllm_neuron.weights.loading import (
    CheckpointError,
    LoadProgress,
    dummy_weights,
    load_weights,
    stream_weights,
    total_bytes,
)
from vllm_neuron.weights.table import WeightSpec, WeightTable

TABLE: WeightTable = {
    "both": WeightSpec((5, 4), ("mlp", "hidden"), ("a.weight", "b.weight")),
    "one": WeightSpec((4,), ("hidden",), ("c.weight",)),
    "exact": WeightSpec((2, 2), ("heads", "heads"), ("d.weight",), dtype=torch.float32),
}
Tensors = dict[str, torch.Tensor]


def tensors(dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (2, 4), "b.weight": (3, 4), "c.weight": (4,), "d.weight": (2, 2)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, content: Tensors) -> Path:
    save_file(content, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_fused_and_converted(tmp_path: Path, stored: torch.dtype, served: torch.dtype) -> None:
    content = tensors(stored)
    weights = load_weights(write(tmp_path, content), TABLE, served)
    assert list(weights) == list(TABLE)
    assert torch.equal(weights["both"], torch.cat((content["a.weight"], content["b.weight"])).to(served))
    assert torch.equal(weights["one"], content["c.weight"].to(served))
    assert torch.equal(weights["exact"], content["d.weight"].float())
    assert sum(tensor.nbytes for tensor in weights.values()) == total_bytes(TABLE, served)


def test_shards_give_what_a_single_file_gives(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", shards=4)
    assert len(list(folder.glob("model-*.safetensors"))) >= 4
    assert not (folder / "model.safetensors").exists()
    content = load_file(checkpoint("llama") / "model.safetensors")
    table = {
        name: WeightSpec(tuple(tensor.shape), ("any",) * tensor.dim(), (name,)) for name, tensor in content.items()
    }
    weights = load_weights(folder, table, torch.float32)
    assert all(torch.equal(weights[name], tensor) for name, tensor in content.items())


def test_progress_counts_weights_and_bytes(tmp_path: Path) -> None:
    steps: list[LoadProgress] = []
    load_weights(write(tmp_path, tensors()), TABLE, torch.bfloat16, steps.append)
    assert steps == [
        LoadProgress("both", 1, 3, 40, 64),
        LoadProgress("one", 2, 3, 48, 64),
        LoadProgress("exact", 3, 3, 64, 64),
    ]


def test_weights_outlive_the_files(tmp_path: Path) -> None:
    weights = load_weights(write(tmp_path, tensors()), TABLE, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    assert torch.equal(weights["one"], tensors()["c.weight"])


def test_faults_are_reported_together_before_anything_is_read(tmp_path: Path) -> None:
    content = tensors()
    del content["c.weight"]
    content["b.weight"] = torch.zeros(3, 5)
    content["d.weight"] = torch.zeros(2, 2, dtype=torch.int8)
    content["stranger.weight_scale"] = torch.zeros(1)
    stream = stream_weights(write(tmp_path, content), TABLE, torch.float32)
    with pytest.raises(CheckpointError) as error:
        next(stream)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "missing tensor c.weight" in message
    assert "wrong shape for both, which is [5, 4]: a.weight [2, 4], b.weight [3, 5]" in message
    assert "tensor d.weight is I8; supported: BF16, F16, F32" in message
    assert "unexpected tensor stranger.weight_scale" in message


def test_tensors_that_hugging_face_ignores_may_be_left_over(tmp_path: Path) -> None:
    content = tensors()
    content["lm_head.weight"] = torch.zeros(5, 4)
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    assert set(load_weights(write(tmp_path, content), TABLE, torch.float32)) == set(TABLE)


def _bin(folder: Path) -> None:
    torch.save(tensors(), folder / "pytorch_model.bin")


def _truncated(folder: Path) -> None:
    write(folder, tensors())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])


def _unreadable(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("nowhere")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"c.weight": "model.safetensors"}}))


def _shard_absent(folder: Path) -> None:
    index = {"weight_map": {"c.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: None, "holds neither model.safetensors nor"),
        (_bin, r"\.bin weights only.*save_pretrained"),
        (_truncated, "cannot read .*model.safetensors"),
        (_unreadable, "cannot read .*model.safetensors"),
        (_shard_absent, "cannot read .*model-00002-of-00002.safetensors"),
        (_empty_index, "cannot read .*model.safetensors.index.json"),
    ],
)
def test_unreadable_checkpoints(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path, TABLE, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, number: float, dtype: torch.dtype) -> None:
    content = tensors()
    content["b.weight"][1, 2] = number
    with pytest.raises(CheckpointError, match=r"weight both \(a.weight, b.weight\) has 1 numbers of 20 that are NaN"):
        load_weights(write(tmp_path, content), TABLE, dtype)


def test_numbers_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    content = tensors()
    content["c.weight"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"infinite in float16.*serve it with that --dtype"):
        load_weights(write(tmp_path, content), TABLE, torch.float16)


def test_dummy_weights_fit_the_table_and_repeat() -> None:
    weights = dummy_weights(TABLE, torch.bfloat16, seed=3)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        name: spec.shape for name, spec in TABLE.items()
    }
    assert weights["both"].dtype == torch.bfloat16
    assert weights["exact"].dtype == torch.float32
    again = dummy_weights({"both": TABLE["both"]}, torch.bfloat16, seed=3)
    assert torch.equal(again["both"], weights["both"])
    assert not torch.equal(dummy_weights(TABLE, torch.bfloat16, seed=4)["both"], weights["both"])
