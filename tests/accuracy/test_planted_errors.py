"""Errors planted in one layer are found by the three-way rule, and placed at that layer."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import prompt, write_checkpoint
from tests.models.paging import BLOCK_SIZE, Weights, load, new_cache, prefill_inputs, shuffled_table
from vllm_neuron import nn
from vllm_neuron.accuracy.three_way import DEFAULT_FACTOR
from vllm_neuron.accuracy.validation import ReferenceRun, Validation, judge, reference_runs
from vllm_neuron.models.model import LayerOutputs, Model

LAYERS, PLANTED = 4, 2
PROMPTS = (prompt(20, seed=1), prompt(33, seed=2))
TOKENS = 16
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("planted") / "sound", num_hidden_layers=LAYERS, head_dim=16, num_key_value_heads=4
    )


@cache
def reference(folder: Path, dtype: torch.dtype) -> list[ReferenceRun]:
    return reference_runs(str(folder), dtype, PROMPTS, TOKENS, lambda text: None)


def our_layers(model: Model, weights: Weights, dtype: torch.dtype, token_ids: tuple[int, ...]) -> LayerOutputs:
    """Through the pure functions, in one step over a shuffled paged cache."""
    inputs = prefill_inputs(list(token_ids), 0, shuffled_table(), bucket=len(token_ids))
    assert len(token_ids) <= 16 * BLOCK_SIZE
    return model.layers(weights, new_cache(model, dtype=dtype), inputs)[0]


def validate(folder: Path, dtype: torch.dtype, spoil: Callable[[Weights], None] = lambda weights: None) -> Validation:
    model, weights = load(folder, dtype)
    spoil(weights)
    runs = reference(folder, dtype)
    layers = [our_layers(model, weights, dtype, run.forced.token_ids) for run in runs]
    return judge(runs, [one.logits for one in layers], layers, dtype, DEFAULT_FACTOR, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sound_model_passes_and_is_no_worse_than_transformers(folder: Path, dtype: torch.dtype) -> None:
    found = validate(folder, dtype)
    assert found.passed and found.layer is None and found.logits is None
    assert [stage.stage for stage in found.stages] == [
        "embedding",
        *(f"layer {i}" for i in range(LAYERS)),
        "final norm",
        "logits",
    ]
    assert all(stage.ours_median <= 1.5 * stage.noise_median for stage in found.stages[1:])
    assert found.positions == sum(map(len, PROMPTS)) + 2 * TOKENS
    assert len(found.error_by_position) == len(PROMPTS[0]) + TOKENS


def transposed(weights: Weights) -> None:
    weight = weights[f"layers.{PLANTED}.out"]
    assert weight.shape[0] == weight.shape[1]
    weights[f"layers.{PLANTED}.out"] = weight.T.contiguous()


def scaled(weights: Weights) -> None:
    """By a half in bfloat16, by a thousandth in float32: what each dtype's rounding does not hide."""
    weight = weights[f"layers.{PLANTED}.down"]
    weights[f"layers.{PLANTED}.down"] = weight * (1.5 if weight.dtype == torch.bfloat16 else 1.001)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoil", [transposed, scaled])
def test_a_wrong_weight_is_placed_at_its_layer(
    folder: Path, dtype: torch.dtype, spoil: Callable[[Weights], None]
) -> None:
    found = validate(folder, dtype, spoil)
    assert not found.passed
    assert found.layer is not None and found.layer.excess.stage == f"layer {PLANTED}"
    assert (found.layer.prompt, found.layer.position) == (0, 0)
    assert found.logits is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_rope_of_one_layer_is_placed_at_the_layer_and_after_the_first_position(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The angle of position 0 is 0, so nothing is wrong there."""
    calls = 0
    sound = nn.rope

    def backwards_once(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        nonlocal calls
        calls += 1
        # Queries only: turning both the other way is the same attention.
        return (
            sound(q, k, cos, sin)
            if calls % LAYERS != PLANTED + 1
            else (sound(q, k, cos, -sin)[0], sound(q, k, cos, sin)[1])
        )

    monkeypatch.setattr(nn, "rope", backwards_once)
    found = validate(folder, dtype)
    assert found.layer is not None and found.layer.excess.stage == f"layer {PLANTED}"
    assert (found.layer.prompt, found.layer.position) == (0, 1)


def test_numbers_that_are_none_are_found(folder: Path) -> None:
    def infinite(weights: Weights) -> None:
        weights[f"layers.{PLANTED}.mlp_norm"][0] = float("nan")

    found = validate(folder, torch.float32, infinite)
    assert found.layer is not None and found.layer.excess.stage == f"layer {PLANTED}"


def test_an_error_of_the_serving_graphs_alone_is_placed_at_its_position(folder: Path) -> None:
    model, weights = load(folder)
    runs = reference(folder, torch.float32)
    layers = [our_layers(model, weights, torch.float32, run.forced.token_ids) for run in runs]
    logits = [one.logits.clone() for one in layers]
    logits[1][7] = logits[1][8]
    found = judge(runs, logits, layers, torch.float32, DEFAULT_FACTOR, 5)
    assert found.layer is None and found.logits is not None
    assert (found.logits.prompt, found.logits.position, found.logits.excess.rows) == (1, 7, 1)
