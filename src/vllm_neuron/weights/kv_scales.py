"""Scales of an FP8 KV cache, as calibration tools leave them in a checkpoint.

A scale is a float32 per layer for keys and one for values; stored value times scale is the number. Where it is kept:

    llm-compressor    model.layers.<n>.self_attn.k_scale           ...self_attn.v_scale
    ModelOpt          model.layers.<n>.self_attn.k_proj.k_scale    ...self_attn.v_proj.v_scale
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from vllm_neuron.kv_cache.fp8 import stretch_of
from vllm_neuron.weights.loading import KV_SCALE, CheckpointError, StoredTensor, open_checkpoint

QUANTIZE, DEQUANTIZE = "kv_quantize", "kv_dequantize"
"""Names of a layer's weights that are made of its scales: [2] each, for keys and for values."""

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def read_kv_scales(folder: str | Path, num_layers: int) -> torch.Tensor | None:
    """Scales [L, 2] float32 of keys and of values, as the checkpoint has them; None if it has none.

    Raises:
        CheckpointError: a layer has only some of its scales or some twice, there are scales of other layers, or a
            scale is no positive number; the message lists all of these.
    """
    with ExitStack() as stack:
        stored = open_checkpoint(Path(folder), stack)
        names = sorted(name for name in stored if KV_SCALE.search(name))
        if not names:
            return None
        found: dict[tuple[int, int], list[str]] = {}
        for name in names:
            found.setdefault(_place(name), []).append(name)
        faults = [*_misplaced(found, num_layers), *(fault for name in names for fault in _fault(name, stored[name]))]
        if faults:
            raise CheckpointError(
                "\n".join([f"checkpoint {folder} has unusable scales of the KV cache:", *faults, _REMEDY])
            )
        scales = torch.empty(num_layers, 2)
        for (layer, part), (name,) in found.items():
            scales[layer, part] = _value(stored[name])
        return scales


def scale_weights(scales: torch.Tensor, limit: float) -> dict[str, torch.Tensor]:
    """The weights that a model with an FP8 KV cache makes of its scales. The direction is turned here, once.

    Args:
        scales: [L, 2] float32, see `read_kv_scales`.
        limit: the largest magnitude that the cache stores.
    """
    dequantize = scales * stretch_of(limit)
    quantize = dequantize.reciprocal()
    return {
        f"layers.{layer}.{name}": factors[layer].clone()
        for layer in range(len(scales))
        for name, factors in ((QUANTIZE, quantize), (DEQUANTIZE, dequantize))
    }


_REMEDY = "Calibrate again (vllm-neuron calibrate-kv), or leave out --kv-cache-dtype."


def _place(name: str) -> tuple[int, int]:
    """Layer, and 0 for keys or 1 for values."""
    layer = _LAYER.search(name)
    return int(layer[1]) if layer else -1, int(name.endswith("v_scale"))


def _misplaced(found: Mapping[tuple[int, int], list[str]], num_layers: int) -> Iterator[str]:
    for part, kind in enumerate(("keys", "values")):
        missing = [layer for layer in range(num_layers) if (layer, part) not in found]
        if missing:
            yield f"  no scale of the {kind} of layers {', '.join(map(str, missing))}"
    for (layer, _), names in sorted(found.items()):
        if not 0 <= layer < num_layers:
            yield f"  {names[0]} is of no layer of the model, which has {num_layers}"
        elif len(names) > 1:
            yield f"  {' and '.join(names)} are the same scale"


def _fault(name: str, tensor: StoredTensor) -> Iterator[str]:
    if math.prod(tensor.shape) != 1:
        yield f"  {name} has shape {list(tensor.shape)}; supported: one scale for all heads"
        return
    value = _value(tensor)
    if not (math.isfinite(value) and value > 0):
        yield f"  {name} is {value}, which is no positive number"


def _value(tensor: StoredTensor) -> float:
    return float(tensor.file.get_tensor(tensor.name).float().reshape(()))
