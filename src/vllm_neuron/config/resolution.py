"""The one resolution of the configuration."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_neuron import envs
from vllm_neuron.config import capabilities
from vllm_neuron.config.buckets import plan_buckets
from vllm_neuron.config.faults import ConfigurationError, Fault
from vllm_neuron.config.parsing import parse
from vllm_neuron.config.report import effective_options
from vllm_neuron.config.resolved import Notice, ResolvedConfig
from vllm_neuron.config.settings import ServingSettings

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What model runner V2 serves when nothing selects a runner."""


def resolve(
    settings: ServingSettings, additional_config: Any = None, env: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """All decisions in one place, before any weight is read and before anything is compiled.

    Pure: it logs nothing (`notices` of the result is for that), changes none of its arguments, and decides the
    same again when vLLM's parameters are replaced by those of the result.

    Args:
        settings: vLLM's parameters.
        additional_config: the dictionary of vLLM's --additional-config; None is an empty one.
        env: the environment; None is that of the process.

    Raises:
        ConfigurationError: something is wrong; it holds every fault there is.
    """
    parsed = parse(additional_config)
    variables, bad_variables = _read_variables(env)
    plan = plan_buckets(settings, parsed.neuron, parsed.faulty)
    unreadable = {fault.option for fault in bad_variables}
    refused = capabilities.refusals(settings, parsed, variables, unreadable)
    faults = [*parsed.faults, *plan.faults, *bad_variables, *refused]
    if faults:
        raise ConfigurationError(faults)

    headroom = variables["VLLM_NEURON_RESERVED_HEADROOM_GIB"]
    runner = variables["VLLM_USE_V2_MODEL_RUNNER"]
    dense = any(name in DENSE_ARCHITECTURES for name in settings.architectures)
    return ResolvedConfig(
        backend=variables["VLLM_NEURON_BACKEND"],
        cpu_mode=variables["VLLM_NEURON_CPU_MODE"],
        max_model_len=settings.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_batched_tokens_buckets=plan.tokens,
        num_seqs_buckets=plan.seqs,
        decode_context_length_buckets=plan.contexts,
        kv_segment_size=plan.segment,
        block_size=plan.block_size,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_prompt_embeds=settings.enable_prompt_embeds,
        fp8_kv_cache=settings.kv_cache_dtype in capabilities.FP8_KV_CACHE_DTYPES,
        v2_model_runner=dense if runner is None else runner,
        disable_warmup_compile=variables["VLLM_NEURON_DISABLE_WARMUP_COMPILE"],
        disable_nki_kernels=variables["VLLM_NEURON_DISABLE_NKI_KERNELS"],
        nki_simulator=variables["NKI_SIMULATOR"],
        attn_mask_torch=variables["VLLM_NEURON_ATTN_MASK_TORCH"],
        cpu_compile=variables["VLLM_NEURON_CPU_COMPILE"],
        platform_target=variables["NEURON_PLATFORM_TARGET_OVERRIDE"] if variables["VLLM_NEURON_CPU_COMPILE"] else None,
        disable_compile_cache=variables["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"],
        compiled_artifacts=variables["NEURON_COMPILED_ARTIFACTS"],
        remote_cache=variables["NEURON_LIBTORCH_REMOTE_CACHE"],
        compile_workers=variables["NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS"],
        compile_timeout=variables["NEURON_LIBTORCH_COMPILATION_TIMEOUT"],
        tensor_parallel_size=settings.tensor_parallel_size,
        on_device_sampling=parsed.neuron.on_device_sampling_config,
        async_scheduling=capabilities.schedules_asynchronously(settings, parsed),
        gpu_memory_utilization=settings.gpu_memory_utilization if headroom is None else 1.0,
        kv_cap_fraction=variables["VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"],
        kv_headroom_gib=headroom,
        kv_minimum_gib=variables["VLLM_NEURON_MIN_KV_BUDGET_GIB"],
        num_gpu_blocks_override=settings.num_gpu_blocks_override,
        options=effective_options(settings, parsed, plan, headroom is not None),
        notices=(
            *parsed.notices,
            *plan.notices,
            *(Notice(logging.WARNING, text) for text in envs.warnings(env)),
            *capabilities.warnings(settings, parsed.neuron, variables),
            *_runner_warnings(runner, dense, settings),
        ),
    )


def log_notices(resolved: ResolvedConfig) -> None:
    """Log what the resolution has to say. The caller sees to it that this happens once per server."""
    logger = logging.getLogger("vllm_neuron")
    for notice in resolved.notices:
        logger.log(notice.level, "%s", notice.text)


def _read_variables(env: Mapping[str, str] | None) -> tuple[dict[str, Any], list[Fault]]:
    """Every variable by name, and the faults of those that are not readable, which have their defaults here."""
    values, faults = {}, []
    for name, variable in envs.VARIABLES.items():
        try:
            values[name] = envs.read(name, env)
        except envs.EnvironmentVariableError as error:
            values[name] = envs.default(variable, env)
            faults.append(Fault(error.name, error.value, f"must be {error.allowed}", "Correct it or unset it."))
    return values, faults


def _runner_warnings(runner: bool | None, dense: bool, settings: ServingSettings) -> Iterator[Notice]:
    if runner and not dense:
        names = ", ".join(settings.architectures) or "a model without a named architecture"
        text = f"VLLM_USE_V2_MODEL_RUNNER=1 forces model runner V2 for {names}, which it does not support."
        yield Notice(logging.WARNING, text)
