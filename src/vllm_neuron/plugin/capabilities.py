"""What vLLM offers and this platform does not, beyond the parameters that the configuration knows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_neuron.config import Fault
from vllm_neuron.kv_cache.layout import group_windows
from vllm_neuron.models.registry import build_model
from vllm_neuron.weights.quantized import quantizes_kv_cache_only

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")
EXECUTORS = ("uni", "mp")


def unsupported(vllm_config: "VllmConfig") -> list[Fault]:
    """Faults of everything that would otherwise be accepted and then fail, or be ignored."""
    return [*_model(vllm_config), *_loading(vllm_config), *_execution(vllm_config), *_memory(vllm_config)]


def _model(vllm_config: "VllmConfig") -> Iterator[Fault]:
    model = vllm_config.model_config
    quantized = model.quantization and not quantizes_kv_cache_only(model.hf_text_config)
    if quantized or model.is_multimodal_model:
        # Refused by the configuration, in words that fit better.
        return
    try:
        windows = group_windows(build_model(model.hf_text_config, model.max_model_len).kv_layers)
    except ValueError as error:
        named = ", ".join(model.hf_config.architectures or ()) or None
        yield Fault("architectures", named, str(error), "Serve another model.")
        return
    if len(windows) > 1:
        for option, value in (
            ("disable_hybrid_kv_cache_manager", vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
            ("kv_events_config", vllm_config.kv_events_config),
        ):
            if value:
                rule = (
                    "layers with and without a sliding window need vLLM's hybrid KV cache manager, which it turns off"
                )
                yield Fault(option, value, rule, f"Remove --{option.replace('_', '-')}.")


def _loading(vllm_config: "VllmConfig") -> Iterator[Fault]:
    load_format = vllm_config.load_config.load_format
    if load_format not in LOAD_FORMATS:
        rule = f"must be one of {', '.join(LOAD_FORMATS)}"
        yield Fault("load_format", load_format, rule, "Leave it out: weights are read from safetensors files.")
    if vllm_config.model_config.enable_sleep_mode:
        yield Fault("enable_sleep_mode", True, "sleep mode", "Remove --enable-sleep-mode.", later=True)
    if vllm_config.profiler_config.profiler:
        profiler = vllm_config.profiler_config.profiler
        yield Fault("profiler_config.profiler", profiler, "profiling", "Remove --profiler-config.", later=True)


def _execution(vllm_config: "VllmConfig") -> Iterator[Fault]:
    executor = vllm_config.parallel_config.distributed_executor_backend
    if executor not in EXECUTORS:
        rule = f"must be one of {', '.join(EXECUTORS)}"
        yield Fault("distributed_executor_backend", executor, rule, "Leave it out.")


def _memory(vllm_config: "VllmConfig") -> Iterator[Fault]:
    cache = vllm_config.cache_config
    for option, value in (
        ("cpu_offload_gb", cache.cpu_offload_gb),
        ("calculate_kv_scales", cache.calculate_kv_scales),
        ("kv_sharing_fast_prefill", cache.kv_sharing_fast_prefill),
        ("kv_offloading_size", cache.kv_offloading_size),
        ("kv_cache_memory_bytes", cache.kv_cache_memory_bytes),
    ):
        if value:
            yield Fault(option, value, option, f"Remove --{option.replace('_', '-')}.", later=True)
