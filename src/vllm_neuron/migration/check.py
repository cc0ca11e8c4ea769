"""Whether this plugin would accept a launch: its own validator asked, without vLLM."""

from dataclasses import replace
from typing import Any

from vllm_neuron.config import ConfigurationError, Fault, ServingSettings, resolve
from vllm_neuron.config.parsing import NEURON
from vllm_neuron.migration.launch import Expression, Launch, Option
from vllm_neuron.migration.values import is_on, read_mapping, whole_number

ADDITIONAL = "additional_config"

LONGEST = 1 << 17
"""Stands for max_model_len where the launch leaves it to the model: only the model knows."""
_UNSET = ServingSettings(
    max_model_len=LONGEST,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_num_seqs_set=False,
    max_num_batched_tokens_set=False,
)
"""A launch that sets nothing; the limits are vLLM's, and may be changed."""
_DTYPES = {"auto": "bfloat16", "half": "float16", "float": "float32"}
_INTEGERS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
)
_SWITCHES = (
    *("enable_prefix_caching", "enable_chunked_prefill", "enable_prompt_embeds", "async_scheduling"),
    *("enable_expert_parallel", "enable_lora", "mm_encoder_only", "enforce_eager"),
)
_TEXTS = ("kv_cache_dtype", "quantization", "scheduling_policy")


def faults_of(launch: Launch) -> tuple[Fault, ...]:
    """What the validator says of a launch. Values that are only known when it runs count as not set."""
    environment = {name: value for name, value in launch.environment.items() if not isinstance(value, Expression)}
    additional = launch.options.get(ADDITIONAL)
    try:
        resolve(settings_of(launch), _known(additional.value) if additional and additional.known else None, environment)
    except ConfigurationError as error:
        return error.faults
    return ()


def unchecked(launch: Launch) -> tuple[str, ...]:
    """Options and variables whose values are only known when the launch runs."""
    options = (option.flag for option in launch.options.values() if not option.known and option.name != "model")
    return (*options, *(name for name, value in launch.environment.items() if isinstance(value, Expression)))


def settings_of(launch: Launch) -> ServingSettings:
    """vLLM's parameters as far as the launch says them."""
    known = {option.name: option.value for option in launch.options.values() if option.known}
    changes: dict[str, Any] = {
        name: number for name in _INTEGERS if (number := whole_number(known.get(name))) is not None
    }
    changes |= {name: is_on(known[name]) for name in _SWITCHES if name in known}
    changes |= {name: str(known[name]) for name in _TEXTS if name in known}
    changes |= {f"{name}_set": True for name in ("max_num_seqs", "max_num_batched_tokens") if name in changes}
    if "max_model_len" not in changes:
        changes.pop("num_gpu_blocks_override", None)
    if "dtype" in known:
        dtype = str(known["dtype"]).removeprefix("torch.")
        changes["dtype"] = _DTYPES.get(dtype, dtype)
    if known.get("runner") == "pooling":
        changes["is_pooling"] = True
    changes |= {
        setting: _named(known[name], key)
        for setting, name, key in (
            ("speculative_method", "speculative_config", "method"),
            ("kv_connector", "kv_transfer_config", "kv_connector"),
            ("ec_connector", "ec_transfer_config", "ec_connector"),
        )
        if name in known
    }
    return replace(_UNSET, **changes)


def _named(value: Any, key: str) -> str:
    found = value if isinstance(value, dict) else (read_mapping(str(value)) or ({}, False))[0]
    return str(found.get(key) or "unnamed")


def _known(value: Any) -> Any:
    """A configuration without the parts that are only known when the launch runs."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if not isinstance(item, Expression)}
    if isinstance(value, list):
        return [_known(item) for item in value if not isinstance(item, Expression)]
    return value


def without(launch: Launch, fault: Fault) -> Launch:
    """The launch without the option that a fault names; the same launch if it does not have it."""
    options = dict(launch.options)
    name = fault.option.split(".")[0]
    if name != ADDITIONAL:
        options.pop(name, None)
        environment = {key: value for key, value in launch.environment.items() if key != name}
        return replace(launch, options=options, environment=environment)
    config = options[ADDITIONAL].value if ADDITIONAL in options else None
    if not isinstance(config, dict):
        return launch
    config = _without_path(config, fault.option.split(".")[1:])
    if fault.option == f"{NEURON}.quantization_dtype":
        config = _without_path(config, ["neuron_config", "quantized"])
    options.pop(ADDITIONAL)
    if config:
        options[ADDITIONAL] = Option(ADDITIONAL, config)
    return replace(launch, options=options)


def _without_path(config: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """The configuration without one key; a group that is empty then goes too."""
    first, *rest = path
    inner = config.get(first)
    left = {key: value for key, value in config.items() if key != first}
    if rest and isinstance(inner, dict) and (kept := _without_path(inner, rest)):
        return {key: kept if key == first else value for key, value in config.items()}
    return left
