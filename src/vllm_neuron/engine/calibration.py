"""Scales of an FP8 KV cache, from what a model's own cache holds after it has read a sample of text.

The largest magnitude of a layer's keys, rotary embedding included, becomes the largest value of float8_e4m3fn, and so
do its values. Nothing is compiled: the step runs as it is, over a cache in the model's dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_neuron.kernels.cpu import build
from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kv_cache.fp8 import CALIBRATED_FOR
from vllm_neuron.kv_cache.layout import KVCache, KVLayerSpec, layer_shapes, num_groups, pool_indexes
from vllm_neuron.models.model import Model, StepInputs
from vllm_neuron.models.registry import build_model
from vllm_neuron.weights.calibrated import require_room, write_calibrated
from vllm_neuron.weights.loading import load_weights
from vllm_neuron.weights.table import Weights

SERVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WINDOW = 512
"""Tokens that are read at once, each window from position 0 on."""


def calibrate(
    model: Model,
    weights: Weights,
    token_ids: Sequence[int],
    dtype: torch.dtype,
    report: Callable[[int], None] = lambda done: None,
) -> torch.Tensor:
    """Scales [L, 2] float32 of the keys and the values of each layer: stored value times scale is the number.

    Args:
        model: with a KV cache in its own dtype.
        weights: of the model, its constants included.
        token_ids: the sample, of any length.
        dtype: the model is served in.
        report: is told how many tokens have been read.

    Raises:
        ValueError: there are no tokens, or the model computes something that is not finite.
        KernelBuildError: the C++ kernels cannot be built.
    """
    if not token_ids:
        raise ValueError("There is nothing to calibrate with: the sample has no token.")
    largest = torch.zeros(len(model.kv_layers), 2)
    groups = num_groups(model.kv_layers)
    shapes = layer_shapes(model.kv_layers, 1 + groups, WINDOW)
    kernels = KernelSet.TORCH if build.fault() else KernelSet.CPU
    with torch.no_grad(), using(kernels):
        for start in range(0, len(token_ids), WINDOW):
            window = token_ids[start : start + WINDOW]
            cache: KVCache = [(torch.zeros(s, dtype=dtype), torch.zeros(s, dtype=dtype)) for s in shapes]
            _, cache = model.forward(weights, cache, one_window(window, groups))
            largest = torch.maximum(largest, _magnitudes(cache, model.kv_layers))
            report(start + len(window))
    if not largest.isfinite().all():
        layers = (~largest.isfinite()).any(1).nonzero().flatten().tolist()
        raise ValueError(f"Keys or values of layers {layers} are not finite, so they have no scale.")
    return torch.where(largest > 0, largest / CALIBRATED_FOR, 1.0)


def one_window(token_ids: Sequence[int], groups: int = 1) -> StepInputs:
    """Inputs of a whole request of up to `WINDOW` tokens, in one block of `WINDOW` tokens for each KV group: that of
    group g is block 1 + g, as block 0 is the null block."""
    positions = torch.arange(len(token_ids), dtype=torch.int32)
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=positions,
        block_tables=tuple(torch.tensor([[1 + group]], dtype=torch.int32) for group in range(groups)),
        slot_mappings=tuple(positions + (1 + group) * WINDOW for group in range(groups)),
        logits_rows=torch.zeros(1, dtype=torch.int32),
    )


def _magnitudes(cache: KVCache, layers: Sequence[KVLayerSpec]) -> torch.Tensor:
    """The largest magnitude [L, 2] of each layer's keys and values. What was not written is zero."""
    held = [
        [half[1 + layer.group] for half in cache[pool]]
        for layer, pool in zip(layers, pool_indexes(layers), strict=True)
    ]
    return torch.stack([torch.stack([half.float().abs().max() for half in halves]) for halves in held])


@dataclass(frozen=True)
class Calibrated:
    """A calibration and what it was made from.

    Attributes:
        scales: [L, 2], see `calibrate`.
        tokens: how many tokens were read.
    """

    scales: torch.Tensor
    tokens: int

    @property
    def largest(self) -> tuple[float, float]:
        """The largest magnitude of any key, and that of any value."""
        keys, values = (self.scales.amax(0) * CALIBRATED_FOR).tolist()
        return keys, values


def calibrate_checkpoint(
    source: Path, target: Path, text: str, tokens: int, report: Callable[[int], None] = lambda done: None
) -> Calibrated:
    """Write `target`: the checkpoint of `source`, with scales from the first `tokens` tokens of `text`.

    Args:
        source: local folder of Hugging Face's form, with a tokenizer.
        target: folder that is not there yet, or empty.
        text: of the kind that the model will read.
        tokens: how many of its tokens to read, at most.
        report: is told how many tokens have been read.

    Raises:
        CheckpointError: the source is no checkpoint of the model or has scales, or the target has files.
        ValueError: a model that is not supported, no token, or nothing finite.
        KernelBuildError: the C++ kernels cannot be built.
        OSError: a file cannot be written.
    """
    from transformers import AutoConfig, AutoTokenizer

    require_room(source, target)
    hf_config = AutoConfig.from_pretrained(source)
    model = build_model(hf_config)
    dtype = hf_config.dtype if hf_config.dtype in SERVED_DTYPES else torch.float32
    token_ids = AutoTokenizer.from_pretrained(source)(text)["input_ids"][:tokens]
    weights = {**load_weights(source, model.weight_table, dtype), **model.constants}
    scales = calibrate(model, weights, token_ids, dtype, report)
    write_calibrated(source, target, scales)
    return Calibrated(scales, len(token_ids))
