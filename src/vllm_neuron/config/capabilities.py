"""What is known and valid but not supported yet, and what contradicts itself. Nothing of it is ever ignored."""

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from vllm_neuron import envs
from vllm_neuron.config.faults import Fault
from vllm_neuron.config.options import MAX_CANDIDATES, EncoderNeuronConfig, NeuronConfig
from vllm_neuron.config.parsing import ENCODER, LANGUAGE_MODEL_ONLY, NEURON, ROOT, SAMPLING, Parsed
from vllm_neuron.config.resolved import Notice
from vllm_neuron.config.settings import ServingSettings

MODEL_DTYPES = ("bfloat16", "float16", "float32")
FP8_KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")


def refusals(
    settings: ServingSettings, parsed: Parsed, variables: Mapping[str, Any], unreadable: Collection[str] = ()
) -> list[Fault]:
    """Faults of options that are not supported yet, or that contradict each other.

    Args:
        settings: vLLM's parameters.
        parsed: `additional_config`.
        variables: value of every environment variable by name.
        unreadable: names of variables that have their default there, because they hold nonsense.
    """
    return [
        *_sampling(parsed),
        *_weights(settings, parsed.neuron),
        *_kv_cache(settings),
        *_multimodal(settings, parsed),
        *_encoder(settings, parsed),
        *_parallel(settings),
        *_serving(settings),
        *_environment(variables, unreadable),
    ]


def _later(capability: str, option: str, value: Any, remedy: str) -> Fault:
    return Fault(option, value, capability, remedy, later=True)


def _sampling(parsed: Parsed) -> Iterator[Fault]:
    config = parsed.neuron.on_device_sampling_config
    if config and config.all_greedy and config.temperature:
        rule = "all_greedy compiles an argmax-only graph, which cannot sample at a temperature above 0"
        yield Fault(SAMPLING, config.model_dump(exclude_unset=True), rule, "Remove all_greedy or temperature.")


def _weights(settings: ServingSettings, neuron: NeuronConfig) -> Iterator[Fault]:
    if neuron.quantization and (neuron.quantized or neuron.quantization_dtype):
        rule = "cannot be combined with quantized and quantization_dtype"
        yield Fault(f"{NEURON}.quantization", neuron.quantization, rule, "Keep one of the two forms.")
    elif neuron.quantized != (neuron.quantization_dtype is not None):
        value = {"quantized": neuron.quantized, "quantization_dtype": neuron.quantization_dtype}
        remedy = "Set both, such as quantized: true and quantization_dtype: int8, or neither."
        yield Fault(NEURON, value, "quantized: true and quantization_dtype need each other", remedy)
    if neuron.quantization:
        yield _later("weight quantization", f"{NEURON}.quantization", neuron.quantization, "Remove it.")
    if neuron.quantized:
        yield _later(
            "weight quantization", f"{NEURON}.quantization_dtype", neuron.quantization_dtype, "Remove it and quantized."
        )
    if settings.quantization == "neuron_quant":
        rule = (
            "vLLM's --quantization flag must not be set to neuron_quant. Keep it unset and configure Neuron-specific "
            "quantization through neuron_config, or supply a calibrated checkpoint for FP8 static weight quantization "
            "(docs/troubleshooting.md#do-not-set-the-quantization-flag-to-neuron_quant)"
        )
        yield Fault("quantization", settings.quantization, rule, "Remove --quantization.")
    elif settings.quantization:
        remedy = (
            "It comes from vLLM's --quantization flag or from the checkpoint's quantization_config: remove the flag, "
            f"and serve a checkpoint in {', '.join(MODEL_DTYPES)}."
        )
        yield _later("quantized weights", "quantization", settings.quantization, remedy)
    if settings.dtype not in MODEL_DTYPES:
        rule = f"must be one of {', '.join(MODEL_DTYPES)}"
        yield Fault("dtype", settings.dtype, rule, "Set --dtype to one of them.")


def _kv_cache(settings: ServingSettings) -> Iterator[Fault]:
    forms = ("auto", settings.dtype, *FP8_KV_CACHE_DTYPES)
    if settings.kv_cache_dtype not in forms:
        rule = f"must be one of {', '.join(forms)}"
        yield Fault("kv_cache_dtype", settings.kv_cache_dtype, rule, "Leave it out or set it to auto.")


def _multimodal(settings: ServingSettings, parsed: Parsed) -> Iterator[Fault]:
    option = f"{ROOT}.{LANGUAGE_MODEL_ONLY}"
    if settings.mm_encoder_only and parsed.language_model_only:
        rule = (
            "cannot be combined with --mm-encoder-only: a pool is either vision-only or language-only "
            "(docs/troubleshooting.md#mm_language_model_only-and-mm_encoder_only-exclude-each-other)"
        )
        yield Fault(option, True, rule, "Remove one of the two, or both to build the whole model in one engine.")
    elif settings.mm_encoder_only:
        yield _later("encoder-only engines", "mm_encoder_only", True, "Remove --mm-encoder-only.")
    elif parsed.language_model_only:
        yield _later("language-model-only engines", option, True, "Remove it.")
    if settings.is_multimodal:
        names = ", ".join(settings.architectures)
        yield _later("multimodal models", "architectures", names, "Serve a text model.")
    if settings.ec_connector:
        remedy = "Remove the encoder cache transfer config."
        yield _later("encoder-disaggregated inference", "ec_connector", settings.ec_connector, remedy)


def _encoder(settings: ServingSettings, parsed: Parsed) -> Iterator[Fault]:
    encoder = parsed.encoder
    block, cap = encoder.encoder_attention_block_size, encoder.max_encoder_seq_len
    yield from _encoder_sizes(encoder, settings.tensor_parallel_size * settings.pipeline_parallel_size)
    if encoder.num_encoder_input_buckets is None and cap is not None and cap < block:
        rule = f"must be at least encoder_attention_block_size={block}"
        yield Fault(f"{ENCODER}.max_encoder_seq_len", cap, rule, "Raise it, or lower encoder_attention_block_size.")
    changed = encoder.model_dump(exclude_defaults=True)
    if changed:
        remedy = "Remove it: text models have no encoder."
        yield _later("multimodal encoders", ENCODER, changed, remedy)


def _encoder_sizes(encoder: EncoderNeuronConfig, world_size: int) -> Iterator[Fault]:
    tp, dp = encoder.tp_size, encoder.dp_size
    if tp > 1 and dp > 1:
        if tp * dp != world_size:
            rule = f"tp_size * dp_size must equal the world size {world_size}"
            remedy = "Correct one of them, or leave one at 1 to have it inferred."
            yield Fault(ENCODER, {"tp_size": tp, "dp_size": dp}, rule, remedy)
        return
    for name, size in (("tp_size", tp), ("dp_size", dp)):
        if world_size % size:
            rule = f"must divide the world size {world_size}"
            yield Fault(f"{ENCODER}.{name}", size, rule, "Correct it or leave it out.")


def _parallel(settings: ServingSettings) -> Iterator[Fault]:
    for capability, option in (
        ("tensor parallelism", "tensor_parallel_size"),
        ("pipeline parallelism", "pipeline_parallel_size"),
        ("data parallelism", "data_parallel_size"),
        ("context parallelism", "context_parallel_size"),
    ):
        size = getattr(settings, option)
        if size > 1:
            yield _later(capability, option, size, f"Set {option} to 1.")
    if settings.enable_expert_parallel:
        yield _later("expert parallelism", "enable_expert_parallel", True, "Remove --enable-expert-parallel.")


def _serving(settings: ServingSettings) -> Iterator[Fault]:
    if settings.scheduling_policy != "fcfs":
        rule = "only the policy fcfs is supported"
        yield Fault("scheduling_policy", settings.scheduling_policy, rule, "Remove --scheduling-policy.")
    method = settings.speculative_method
    if method == "eagle3":
        yield _later("speculative decoding", "speculative_config.method", method, "Remove --speculative-config.")
    elif method is not None:
        rule = "Unsupported speculative decoding method; eagle3 is the only one planned, and it is not supported yet"
        yield Fault("speculative_config.method", method, rule, "Remove --speculative-config.")
    if settings.kv_connector:
        remedy = "Remove --kv-transfer-config."
        yield _later("disaggregated inference", "kv_transfer_config.kv_connector", settings.kv_connector, remedy)
    if settings.enable_lora:
        yield _later("LoRA adapters", "enable_lora", True, "Remove --enable-lora.")
    if settings.is_pooling:
        yield _later("pooling models", "runner", "pooling", "Serve a model that generates text.")


def _environment(variables: Mapping[str, Any], unreadable: Collection[str]) -> Iterator[Fault]:
    cpu_compile, target = variables["VLLM_NEURON_CPU_COMPILE"], "NEURON_PLATFORM_TARGET_OVERRIDE"
    if cpu_compile and variables["VLLM_NEURON_CPU_MODE"]:
        rule = "cannot be combined with VLLM_NEURON_CPU_MODE=1: one compiles for Neuron, the other runs on the CPU"
        yield Fault("VLLM_NEURON_CPU_COMPILE", 1, rule, "Unset one of the two.")
    if cpu_compile and not variables[target] and target not in unreadable:
        yield Fault("VLLM_NEURON_CPU_COMPILE", 1, f"needs {target}", f"Set it to one of {', '.join(envs.TARGETS)}.")
    if cpu_compile and variables["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"]:
        rule = (
            "cannot be combined with NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1, which keeps nothing of what is compiled"
        )
        yield Fault("VLLM_NEURON_CPU_COMPILE", 1, rule, "Unset one of the two.")
    if variables["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"] and variables["VLLM_NEURON_DISABLE_WARMUP_COMPILE"]:
        rule = (
            "cannot be combined with NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1: without a cache every graph has to be "
            "compiled"
        )
        yield Fault("VLLM_NEURON_DISABLE_WARMUP_COMPILE", 1, rule, "Unset one of the two.")
    if variables["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"]:
        for name in ("NEURON_COMPILED_ARTIFACTS", "NEURON_LIBTORCH_REMOTE_CACHE"):
            if variables[name]:
                rule = (
                    "cannot be combined with NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1, which compiles every graph anew"
                )
                yield Fault(name, variables[name], rule, "Unset one of the two.")
    if variables["NKI_SIMULATOR"] and not variables["VLLM_NEURON_CPU_MODE"]:
        rule = "needs VLLM_NEURON_CPU_MODE=1: on Neuron devices, and where one compiles for them, nothing is simulated"
        yield Fault("NKI_SIMULATOR", 1, rule, "Set VLLM_NEURON_CPU_MODE=1, or unset it.")


def schedules_asynchronously(settings: ServingSettings, parsed: Parsed) -> bool:
    """Whether a step is prepared while the one before it runs: if vLLM wants it, and the graphs sample."""
    return settings.async_scheduling and parsed.neuron.on_device_sampling_config is not None


def warnings(settings: ServingSettings, neuron: NeuronConfig, variables: Mapping[str, Any]) -> Iterator[Notice]:
    """What is accepted but has another effect than its name suggests."""
    if settings.enforce_eager:
        text = "enforce_eager has no effect: every step runs a graph that was compiled before the server is ready."
        yield Notice(logging.WARNING, text)
    if variables["NEURON_PLATFORM_TARGET_OVERRIDE"] and not variables["VLLM_NEURON_CPU_COMPILE"]:
        text = (
            "NEURON_PLATFORM_TARGET_OVERRIDE has no effect on serving without VLLM_NEURON_CPU_COMPILE=1: only the NKI "
            "simulator reads it."
        )
        yield Notice(logging.WARNING, text)
    if variables["VLLM_NEURON_RESERVED_HEADROOM_GIB"] is not None:
        yield from _headroom(settings, variables)
    yield from _kernels(variables)
    on_device = neuron.on_device_sampling_config
    if on_device and on_device.all_greedy:
        for name in ("top_k", "top_p"):
            if getattr(on_device, name) is not None:
                yield Notice(logging.WARNING, f"{SAMPLING}.{name} has no effect, because all_greedy is set.")
    elif on_device:
        text = (
            f"On-device sampling chooses among the {MAX_CANDIDATES} most likely tokens: top_k of 0 or -1 means "
            f"{MAX_CANDIDATES} here."
        )
        yield Notice(logging.INFO, text)
    if settings.async_scheduling and on_device is None:
        text = (
            f"Scheduling is synchronous. Async scheduling needs on-device sampling: set {SAMPLING} (to {{}}, say) to "
            "turn both on. See docs/troubleshooting.md#async-scheduling-not-engaging."
        )
        yield Notice(logging.INFO, text)


def _kernels(variables: Mapping[str, Any]) -> Iterator[Notice]:
    disabled, simulated = variables["VLLM_NEURON_DISABLE_NKI_KERNELS"], variables["NKI_SIMULATOR"]
    if simulated and disabled:
        text = "NKI_SIMULATOR has no effect, because VLLM_NEURON_DISABLE_NKI_KERNELS=1 uses no NKI kernels."
        yield Notice(logging.WARNING, text)
    elif simulated:
        text = (
            "NKI_SIMULATOR=1: NKI kernels run in a simulator, about a thousand instructions a second: for tiny models."
        )
        yield Notice(logging.WARNING, text)
    elif not variables["NKI_PRECISE_FP"]:
        yield Notice(logging.WARNING, "NKI_PRECISE_FP has no effect without NKI_SIMULATOR=1.")
    native_on_device = variables["VLLM_NEURON_BACKEND"] == envs.NATIVE and not variables["VLLM_NEURON_CPU_MODE"]
    if variables["VLLM_NEURON_ATTN_MASK_TORCH"] and (disabled or not (simulated or native_on_device)):
        text = "VLLM_NEURON_ATTN_MASK_TORCH=1: granted. No NKI kernel takes part in decode attention in this mode."
        yield Notice(logging.INFO, text)


def _headroom(settings: ServingSettings, variables: Mapping[str, Any]) -> Iterator[Notice]:
    cap = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
    if variables[cap] != envs.VARIABLES[cap].default:
        text = f"{cap} has no effect, because VLLM_NEURON_RESERVED_HEADROOM_GIB is set."
        yield Notice(logging.WARNING, text)
    if settings.gpu_memory_utilization != 1.0:
        text = (
            f"gpu_memory_utilization is changed from {settings.gpu_memory_utilization:g} to 1, because "
            "VLLM_NEURON_RESERVED_HEADROOM_GIB is set."
        )
        yield Notice(logging.INFO, text)
