"""The demo model with an FP8 KV cache, calibrated by our own command: logits near bfloat16's, in half the memory."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from vllm_neuron.cli.main import app
from vllm_neuron.engine.calibration import WINDOW, one_window
from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kv_cache.layout import KVCache, cache_dtype, layer_shapes
from vllm_neuron.models.fp8_cache import with_fp8_cache
from vllm_neuron.models.model import Model
from vllm_neuron.models.registry import build_model
from vllm_neuron.weights.kv_scales import read_kv_scales, scale_weights
from vllm_neuron.weights.loading import load_weights
from vllm_neuron.weights.table import Weights

REPOSITORY = Path(__file__).parents[2]
TOKENS = 256
# What docs/kv-cache.md promises.
MOST_ERROR, MOST_DIVERGENCE, MOST_PERPLEXITY = 0.05, 0.03, 0.05


def read(model: Model, weights: Weights, ids: list[int]) -> tuple[torch.Tensor, KVCache]:
    """Logits [T, V] of a text, and the cache that it leaves."""
    dtype = cache_dtype(model.kv_layers, torch.bfloat16)
    shapes = layer_shapes(model.kv_layers, 2, WINDOW)
    cache = [(torch.zeros(s).to(dtype), torch.zeros(s).to(dtype)) for s in shapes]
    with torch.no_grad(), using(KernelSet.CPU):
        hidden, cache = model.forward(weights, cache, one_window(ids))
        return model.logits(weights, hidden), cache


def num_bytes(cache: KVCache) -> int:
    return sum(half.nbytes for layer in cache for half in layer)


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item())


def test_real_calibrated_cache_is_half_as_large_and_near(demo_model: Path, tmp_path: Path) -> None:
    calibrated = tmp_path / "calibrated"
    arguments = [demo_model, calibrated, "--text", REPOSITORY / "LICENSE", "--tokens", TOKENS]
    done = CliRunner().invoke(app, ["calibrate-kv", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    assert f"scales of 30 layers from {TOKENS} tokens" in done.output
    assert "--kv-cache-dtype fp8" in done.output

    ids = AutoTokenizer.from_pretrained(calibrated)((REPOSITORY / "README.md").read_text())["input_ids"][:TOKENS]
    model = build_model(AutoConfig.from_pretrained(calibrated))
    weights = {**load_weights(calibrated, model.weight_table, torch.bfloat16), **model.constants}
    exact, wide = read(model, weights, ids)
    scales = read_kv_scales(calibrated, len(model.kv_layers))
    assert scales is not None and not torch.equal(scales, torch.ones_like(scales))
    for limit in (448.0, 240.0):
        narrow = with_fp8_cache(model, limit)
        near, cache = read(narrow, {**weights, **scale_weights(scales, limit), **narrow.constants}, ids)
        assert 2 * num_bytes(cache) == num_bytes(wide)
        error = (near - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        log_probabilities = near.log_softmax(-1), exact.log_softmax(-1)
        divergence = torch.nn.functional.kl_div(*log_probabilities, reduction="batchmean", log_target=True)
        assert 0.001 < error < MOST_ERROR and divergence < MOST_DIVERGENCE, (limit, error, divergence)
        assert perplexity(near, ids) == pytest.approx(perplexity(exact, ids), rel=MOST_PERPLEXITY)
