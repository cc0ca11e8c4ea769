"""From vLLM's configuration to ours: what is read, and where the resolved configuration is kept.

The resolved configuration travels as an attribute of VllmConfig, which survives pickling to the engine's process.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from vllm_neuron.config import ResolvedConfig, ServingSettings
from vllm_neuron.kv_cache.layout import group_windows
from vllm_neuron.models.registry import build_model
from vllm_neuron.weights.quantized import quantizes_kv_cache_only

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

ATTRIBUTE = "neuron_resolved"

LIMITS = ("max_num_seqs", "max_num_batched_tokens")
_unset_limits: ContextVar[frozenset[str]] = ContextVar("unset_limits", default=frozenset())


def resolved_config(vllm_config: "VllmConfig") -> ResolvedConfig:
    """The configuration that was resolved when this VllmConfig was made.

    Raises:
        RuntimeError: it has not been resolved; it was made without a model, or by another platform.
    """
    resolved = stored_config(vllm_config)
    if resolved is None:
        raise RuntimeError(
            "This VllmConfig holds no resolved Neuron configuration. Make it with a model and on the Neuron platform."
        )
    return resolved


def stored_config(vllm_config: "VllmConfig") -> ResolvedConfig | None:
    """The resolved configuration, or None if there is none yet."""
    return getattr(vllm_config, ATTRIBUTE, None)


def store_config(vllm_config: "VllmConfig", resolved: ResolvedConfig) -> None:
    """Keep the resolved configuration where `resolved_config` finds it, in this process and in those it is sent to."""
    setattr(vllm_config, ATTRIBUTE, resolved)
    # Later versions of vLLM have this property themselves; both are the one answer to which protocol is spoken.
    vllm_config.use_v2_model_runner = resolved.v2_model_runner  # type: ignore[attr-defined]


def remember_unset_limits() -> None:
    """From now on note which limits the user left open, just before vLLM fills in its defaults.

    VllmConfig itself does not tell a default from a choice. Doing this twice changes nothing.
    """
    from vllm.engine.arg_utils import EngineArgs

    fill_in: Callable[..., None] = EngineArgs._set_default_max_num_seqs_and_batched_tokens_args
    if hasattr(fill_in, "__wrapped__"):
        return

    @wraps(fill_in)
    def noting(self: EngineArgs, *args: Any, **kwargs: Any) -> None:
        _unset_limits.set(frozenset(name for name in LIMITS if getattr(self, name) is None))
        fill_in(self, *args, **kwargs)

    EngineArgs._set_default_max_num_seqs_and_batched_tokens_args = noting  # type: ignore[method-assign]


def take_unset_limits() -> frozenset[str]:
    """The limits that the user left open, for the VllmConfig being made; empty for the next one."""
    unset = _unset_limits.get()
    _unset_limits.set(frozenset())
    return unset


def serving_settings(vllm_config: "VllmConfig", unset_limits: frozenset[str] = frozenset()) -> ServingSettings:
    """vLLM's parameters, of a VllmConfig that has a model.

    Args:
        vllm_config: where to read them.
        unset_limits: those of LIMITS that hold vLLM's defaults.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    multimodal = model.multimodal_config
    return ServingSettings(
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs_set="max_num_seqs" not in unset_limits,
        max_num_batched_tokens_set="max_num_batched_tokens" not in unset_limits,
        block_size=cache.block_size,
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        enable_chunked_prefill=bool(scheduler.enable_chunked_prefill),
        gpu_memory_utilization=cache.gpu_memory_utilization,
        num_gpu_blocks_override=cache.num_gpu_blocks_override,
        kv_windows=_kv_windows(model),
        kv_cache_dtype=cache.cache_dtype,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=None if quantizes_kv_cache_only(model.hf_text_config) else model.quantization,
        enable_prompt_embeds=bool(model.enable_prompt_embeds),
        async_scheduling=bool(scheduler.async_scheduling),
        scheduling_policy=scheduler.policy,
        architectures=tuple(model.hf_config.architectures or ()),
        is_multimodal=model.is_multimodal_model,
        is_pooling=model.runner_type == "pooling",
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        context_parallel_size=max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size),
        enable_expert_parallel=parallel.enable_expert_parallel,
        speculative_method=_named(vllm_config.speculative_config, "method"),
        kv_connector=_named(vllm_config.kv_transfer_config, "kv_connector"),
        ec_connector=_named(vllm_config.ec_transfer_config, "ec_connector"),
        enable_lora=vllm_config.lora_config is not None,
        mm_encoder_only=bool(multimodal and multimodal.mm_encoder_only),
        enforce_eager=model.enforce_eager,
    )


def _kv_windows(model: "ModelConfig") -> tuple[int | None, ...]:
    """Windows of the model's KV groups; one group without any where the model will be refused."""
    try:
        return group_windows(build_model(model.hf_text_config, model.max_model_len).kv_layers)
    except ValueError:
        return (None,)


def _named(config: Any, name: str) -> str | None:
    """A name in an optional part of the configuration; a part without a name still counts as given."""
    if config is None:
        return None
    return getattr(config, name) or "unnamed"


def model_dtype(vllm_config: "VllmConfig") -> torch.dtype:
    """The dtype the model is served in; vLLM has made a torch dtype of whatever the user wrote."""
    dtype = vllm_config.model_config.dtype
    if not isinstance(dtype, torch.dtype):
        raise RuntimeError(f"vLLM has left dtype={dtype!r} unresolved.")
    return dtype
