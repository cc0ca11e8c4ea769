"""Writes a checkpoint with scales of an FP8 KV cache, in the layout of llm-compressor.

The weights are not copied where both folders are on one file system: their files are linked.
"""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from vllm_neuron.weights.loading import INDEX_FILE, KV_SCALE, CheckpointError, open_checkpoint

SCALES_FILE = "kv-scales.safetensors"

_DECLARATION = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "frozen",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}


def require_room(source: Path, target: Path) -> None:
    """Check that `write_calibrated` can do its work, before the work whose result it keeps.

    Raises:
        CheckpointError: the source is no checkpoint or has scales, or the target has files.
    """
    with ExitStack() as stack:
        scales = [name for name in open_checkpoint(source, stack) if KV_SCALE.search(name)]
    if scales:
        raise CheckpointError(f"{source} has scales of the KV cache already, such as {scales[0]}. Serve it as it is.")
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Name a folder that is not there yet.")


def write_calibrated(source: Path, target: Path, scales: torch.Tensor) -> None:
    """Fill `target` with the checkpoint of `source` and these scales [L, 2] of keys and values.

    Raises:
        CheckpointError: see `require_room`.
        OSError: a file cannot be written.
    """
    require_room(source, target)
    target.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = {name: tensor.path.name for name, tensor in open_checkpoint(source, stack).items()}
    for path in source.iterdir():
        if path.is_file() and path.name not in ("config.json", INDEX_FILE):
            _link(path.resolve(), target / path.name)
    tensors = {
        f"model.layers.{layer}.self_attn.{name}": scales[layer, part].reshape(1).clone()
        for layer in range(len(scales))
        for part, name in enumerate(("k_scale", "v_scale"))
    }
    (target / SCALES_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    weight_map = {**files, **dict.fromkeys(tensors, SCALES_FILE)}
    size = sum((target / name).stat().st_size for name in set(weight_map.values()))
    _write(target / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
    config = json.loads((source / "config.json").read_text())
    _write(target / "config.json", {**config, "quantization_config": _DECLARATION})


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
