"""The effective configuration, as it is printed at start."""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_neuron import envs
from vllm_neuron.config.buckets import CONTEXTS, SEQS, TOKENS, BucketPlan
from vllm_neuron.config.capabilities import schedules_asynchronously
from vllm_neuron.config.parsing import ENCODER, LANGUAGE_MODEL_ONLY, NEURON, ROOT, Parsed
from vllm_neuron.config.resolved import EffectiveOption, ResolvedConfig
from vllm_neuron.config.settings import ServingSettings


def effective_options(
    settings: ServingSettings, parsed: Parsed, plan: BucketPlan, headroom: bool
) -> tuple[EffectiveOption, ...]:
    """Every option of the tables with the value that is in effect and where that comes from."""
    return tuple(_options(settings, parsed, plan, headroom))


def _options(settings: ServingSettings, parsed: Parsed, plan: BucketPlan, headroom: bool) -> Iterator[EffectiveOption]:
    def derived(path: str, value: Any) -> EffectiveOption:
        return EffectiveOption(path.removeprefix(f"{ROOT}."), value, "set" if path in parsed.given else "derived")

    yield derived(TOKENS, list(plan.tokens))
    yield derived(SEQS, list(plan.seqs))
    yield derived(CONTEXTS, list(plan.contexts))
    for path, group in ((NEURON, parsed.neuron), (ENCODER, parsed.encoder)):
        for name, value in group.model_dump(mode="json").items():
            option = f"{path}.{name}"
            if option not in (TOKENS, SEQS, CONTEXTS):
                source = "set" if option in parsed.given else "default"
                yield EffectiveOption(option.removeprefix(f"{ROOT}."), value, source)
    flag = f"{ROOT}.{LANGUAGE_MODEL_ONLY}"
    source = "set" if flag in parsed.given else "default"
    yield EffectiveOption(LANGUAGE_MODEL_ONLY, parsed.language_model_only, source)

    yield EffectiveOption("max_model_len", settings.max_model_len, "vLLM")
    utilization = 1.0 if headroom else settings.gpu_memory_utilization
    for name, asked, value in (
        ("max_num_batched_tokens", settings.max_num_batched_tokens, plan.max_num_batched_tokens),
        ("max_num_seqs", settings.max_num_seqs, plan.max_num_seqs),
        ("block_size", settings.block_size, plan.block_size),
        ("async_scheduling", settings.async_scheduling, schedules_asynchronously(settings, parsed)),
        ("gpu_memory_utilization", settings.gpu_memory_utilization, utilization),
    ):
        yield EffectiveOption(name, value, "vLLM" if asked == value else "derived")
    for name in (
        "enable_prefix_caching",
        "num_gpu_blocks_override",
        "kv_cache_dtype",
        "enable_prompt_embeds",
        "mm_encoder_only",
    ):
        yield EffectiveOption(name, getattr(settings, name), "vLLM")


def effective_report(resolved: ResolvedConfig, variables: Sequence[envs.Effective]) -> str:
    """A block of aligned lines: every option and every environment variable, its value, and where that comes from.

    Args:
        resolved: the configuration.
        variables: what `envs.effective()` returns.
    """
    runner = "V2" if resolved.v2_model_runner else "V1"
    place = "CPU mode" if resolved.cpu_mode else "Neuron devices"
    if resolved.cpu_compile:
        place = f"CPU compile mode for {resolved.platform_target}"
    rows = [*resolved.options, *(EffectiveOption(v.name, v.value, v.source) for v in variables)]
    shown = [(row.name, _show(row.value), _source(row)) for row in rows]
    width = max(len(name) for name, _, _ in shown)
    value_width = min(max(len(value) for _, value, _ in shown), 48)
    lines = [f"Effective configuration: backend {resolved.backend}, {place}, model runner {runner}"]
    lines += [f"  {name:<{width}}  {value:<{value_width}}  {source}".rstrip() for name, value, source in shown]
    return "\n".join(lines)


def _show(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()
    return str(value)


def _source(row: EffectiveOption) -> str:
    """Defaults are left blank, so that what differs stands out."""
    return "" if row.source == "default" else row.source if row.source != row.name else "environment"
