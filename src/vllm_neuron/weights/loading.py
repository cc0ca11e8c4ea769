"""Reading safetensors checkpoints into the fused weights of a table."""

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from vllm_neuron.weights.memory import allocate
from vllm_neuron.weights.table import WeightSpec, WeightTable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = ("BF16", "F16", "F32")

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Checkpoint tensors that are computed from the configuration, as Hugging Face does."""
TIED_HEAD = "lm_head.weight"
"""Ignored when no weight reads it: a copy of tied embeddings."""
KV_SCALE = re.compile(r"\.self_attn\.(?:k_scale|v_scale|k_proj\.k_scale|v_proj\.v_scale)$")
"""Scales of an FP8 KV cache: `kv_scales` reads them, and a cache in the model's dtype has no use for them."""


class CheckpointError(ValueError):
    """The checkpoint does not fit the model; the message lists everything that is wrong."""


class LoadProgress(NamedTuple):
    """How far loading is: `done` of `total` weights, `bytes_done` of `bytes_total` as served, the last being `name`."""

    name: str
    done: int
    total: int
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: its name, the path of its file, that file, shape and safetensors dtype name."""

    name: str
    path: Path
    file: Any
    shape: tuple[int, ...]
    dtype: str


def total_bytes(table: WeightTable, dtype: torch.dtype) -> int:
    """Bytes of all weights of `table` served in `dtype`."""
    return sum(spec.num_bytes(dtype) for spec in table.values())


def load_weights(
    folder: str | Path,
    table: WeightTable,
    dtype: torch.dtype,
    progress: Callable[[LoadProgress], None] | None = None,
) -> dict[str, torch.Tensor]:
    """All weights of `table`, read from a local Hugging Face folder: see `stream_weights`."""
    return dict(stream_weights(folder, table, dtype, progress))


def stream_weights(
    folder: str | Path,
    table: WeightTable,
    dtype: torch.dtype,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight of `table` in its order, fused and converted to `dtype` (or the dtype its spec demands).

    The whole checkpoint is checked by its headers before the first tensor is read. At most one checkpoint tensor is
    in memory besides the weights, which share one piece of it (`memory.allocate`).

    Args:
        folder: holds model.safetensors, or shards and model.safetensors.index.json.
        table: what to read. Weights without sources are left out: `kv_scales` makes them.
        dtype: dtype the model is served in.
        progress: called after each weight.

    Raises:
        CheckpointError: no safetensors there, an unreadable file, or tensors that are missing, of another shape or
            dtype, or that the model has no use for, all of these in one message; or a weight with numbers that are not
            finite in ``dtype``.
    """
    table = {name: spec for name, spec in table.items() if spec.sources}
    with ExitStack() as stack:
        stored = open_checkpoint(Path(folder), stack)
        faults = _faults(stored, table)
        if faults:
            raise CheckpointError("\n".join([f"checkpoint {folder} does not fit the model:", *faults]))
        weights = allocate(table, dtype)
        total, bytes_total, bytes_done = len(table), total_bytes(table, dtype), 0
        for done, (name, spec) in enumerate(table.items(), start=1):
            weight = weights[name]
            _fuse(stored, spec, weight)
            _require_finite(weight, name, spec)
            yield name, weight
            bytes_done += spec.num_bytes(dtype)
            if progress is not None:
                progress(LoadProgress(name, done, total, bytes_done, bytes_total))


def dummy_weights(table: WeightTable, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights that keep activations finite: vectors are ones, matrices normal with variance 1 / in_features.

    The same name, shape and seed give the same numbers, whatever else the table holds.
    """
    weights = allocate(table, dtype)
    for name, weight in weights.items():
        if weight.dim() == 1:
            weight.fill_(1)
        else:
            generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
            weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[-1]))
    return weights


def open_checkpoint(folder: Path, stack: ExitStack) -> Mapping[str, StoredTensor]:
    """Every tensor of a checkpoint by its name, from the headers of its files, which stay open as long as `stack`.

    Raises:
        CheckpointError: no safetensors there, or an unreadable file.
    """
    stored: dict[str, StoredTensor] = {}
    for path in _files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                view = file.get_slice(name)
                stored[name] = StoredTensor(name, path, file, tuple(view.get_shape()), view.get_dtype())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}. Copy or download the file again.") from error
    return stored


def _files(folder: Path) -> Iterable[Path]:
    if (folder / INDEX_FILE).is_file():
        try:
            names = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"cannot read {folder / INDEX_FILE}: {error!r}. Copy or download it again."
            ) from error
        return [folder / name for name in sorted(names)]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise CheckpointError(
            f"{folder} holds PyTorch .bin weights only, which are not read; convert them once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, safe_serialization=True)"
        )
    raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _faults(stored: Mapping[str, StoredTensor], table: WeightTable) -> list[str]:
    """One line for each thing that does not fit."""
    faults = []
    wanted = {source for spec in table.values() for source in spec.sources}
    faults += [f"  missing tensor {name}" for name in sorted(wanted - stored.keys())]
    for name, spec in table.items():
        parts = [(source, stored[source].shape) for source in spec.sources if source in stored]
        if len(parts) == len(spec.sources) and not _fits(spec, [shape for _, shape in parts]):
            found = ", ".join(f"{source} {list(shape)}" for source, shape in parts)
            faults.append(f"  wrong shape for {name}, which is {list(spec.shape)}: {found}")
    faults += [
        f"  tensor {name} is {stored[name].dtype}; supported: {', '.join(FLOAT_TYPES)}"
        for name in sorted(wanted & stored.keys())
        if stored[name].dtype not in FLOAT_TYPES
    ]
    leftover = sorted(name for name in stored.keys() - wanted if not _ignored(name))
    return faults + [f"  unexpected tensor {name}" for name in leftover]


def _fits(spec: WeightSpec, shapes: list[tuple[int, ...]]) -> bool:
    rest = spec.shape[1:]
    same_rest = all(len(shape) == len(spec.shape) and shape[1:] == rest for shape in shapes)
    return same_rest and sum(shape[0] for shape in shapes) == spec.shape[0]


def _ignored(name: str) -> bool:
    return name == TIED_HEAD or name.endswith(IGNORED_SUFFIXES) or KV_SCALE.search(name) is not None


def _require_finite(weight: torch.Tensor, name: str, spec: WeightSpec) -> None:
    # NaN makes both extremes NaN; one pass over the weight, and no copy of it.
    if not all(map(torch.isfinite, torch.aminmax(weight))):
        bad = int((~torch.isfinite(weight)).sum())
        raise CheckpointError(
            f"weight {name} ({', '.join(spec.sources)}) has {bad} numbers of {weight.numel()} that are NaN or "
            f"infinite in {str(weight.dtype).removeprefix('torch.')}. Copy or download the checkpoint again; if it is "
            "of a wider dtype, serve it with that --dtype."
        )


def _fuse(stored: Mapping[str, StoredTensor], spec: WeightSpec, weight: torch.Tensor) -> None:
    """Write a weight's sources into it, one below the other."""
    start = 0
    for source in spec.sources:
        rows = stored[source].shape[0]
        weight[start : start + rows].copy_(stored[source].file.get_tensor(source))
        start += rows
