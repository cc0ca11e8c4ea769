"""Where the weights are, and how loading them is reported."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_neuron.models.fp8_cache import LIMIT
from vllm_neuron.models.model import Model
from vllm_neuron.plugin.settings import model_dtype, resolved_config
from vllm_neuron.weights.kv_scales import read_kv_scales, scale_weights
from vllm_neuron.weights.loading import LoadProgress, dummy_weights, load_weights, total_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

GIB = 1 << 30
REPORT_SECONDS = 5.0


def load_model_weights(vllm_config: "VllmConfig", model: Model) -> dict[str, torch.Tensor]:
    """Every weight of the model's table, in the dtype the model is served in.

    Raises:
        CheckpointError: the checkpoint is not readable, or does not fit the model.
    """
    dtype, seed = model_dtype(vllm_config), vllm_config.model_config.seed
    start = time.monotonic()
    if vllm_config.load_config.load_format == "dummy":
        weights, source = dummy_weights(model.weight_table, dtype, seed), "made up (load_format=dummy)"
    else:
        folder = checkpoint_folder(vllm_config)
        weights = load_weights(folder, model.weight_table, dtype, _Reporter())
        if resolved_config(vllm_config).fp8_kv_cache:
            weights |= load_scales(folder, model)
        source = f"read from {folder}"
    logger.info(
        "%d weights, %.2f GiB in %s, %s in %.1f s",
        len(weights),
        total_bytes(model.weight_table, dtype) / GIB,
        str(dtype).removeprefix("torch."),
        source,
        time.monotonic() - start,
    )
    return weights


def load_scales(folder: Path, model: Model) -> dict[str, torch.Tensor]:
    """The scales of a model's FP8 KV cache, from its checkpoint or else 1.

    Raises:
        CheckpointError: the checkpoint has scales, and they are not usable.
    """
    scales = read_kv_scales(folder, len(model.kv_layers))
    if scales is None:
        logger.warning(
            "The KV cache is FP8 and %s has no scales for it, so all are 1: answers may be worse. Calibrate the "
            "checkpoint (vllm-neuron calibrate-kv), or leave out --kv-cache-dtype.",
            folder,
        )
        scales = torch.ones(len(model.kv_layers), 2)
    return scale_weights(scales, float(model.constants[LIMIT]))


def checkpoint_folder(vllm_config: "VllmConfig") -> Path:
    """The local folder of the model's safetensors files, which are downloaded if need be."""
    config, load = vllm_config.model_config, vllm_config.load_config
    if Path(config.model).is_dir():
        return Path(config.model)
    # Importing vLLM's loader takes seconds.
    from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

    patterns = ["*.safetensors", "*.safetensors.index.json"]
    folder = download_weights_from_hf(
        config.model, load.download_dir, patterns, config.revision, ignore_patterns=load.ignore_patterns
    )
    return Path(folder)


class _Reporter:
    """Logs how far loading is, every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: LoadProgress) -> None:
        now = time.monotonic()
        if now - self._last < REPORT_SECONDS:
            return
        self._last = now
        logger.info(
            "Loading weights: %d of %d, %.2f of %.2f GiB",
            progress.done,
            progress.total,
            progress.bytes_done / GIB,
            progress.bytes_total / GIB,
        )
