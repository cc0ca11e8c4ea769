"""The tables of docs/configuration.md, read off the option classes, the table of variables and the validator."""

import json
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.documentation.tables import table
from tests.migration.features import OPEN
from vllm_neuron import envs
from vllm_neuron.config import (
    ConfigurationError,
    EncoderNeuronConfig,
    NeuronConfig,
    OnDeviceSamplingConfig,
    ServingSettings,
    resolve,
)

EXAMPLES: dict[type[BaseModel], dict[str, Any]] = {
    NeuronConfig: {
        "num_batched_tokens_buckets": [128, 512],
        "num_seqs_buckets": [1, 4],
        "kv_segment_size_buckets": [512],
        "decode_context_length_buckets": [256, 1024],
        "on_device_sampling_config": {"top_p": 0.9},
        "quantization": "mxfp8",
        "quantized": True,
        "quantization_dtype": "int8",
    },
    OnDeviceSamplingConfig: {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "all_greedy": True},
    EncoderNeuronConfig: {
        "num_encoder_input_buckets": [2048, 8192],
        "encoder_attention_block_size": 1024,
        "max_encoder_seq_len": 8192,
        "tp_size": 1,
        "dp_size": 1,
        "encoder_cache_num_blocks": 64,
        "encoder_cache_min_hold_time_ms": 100.0,
    },
}
"""A valid value of every option. The validator is asked what it makes of it."""

PARTNERS = {"quantized": {"quantization_dtype": "int8"}, "quantization_dtype": {"quantized": True}}
"""Options that are valid together only."""

ALWAYS_LATER = {EncoderNeuronConfig: "multimodal encoders"}
"""Groups that are refused as a whole, also where one of their options has its default."""


def option_table(group: type[BaseModel]) -> str:
    """Every option of a group: type, default, meaning, an example, and whether this release has it."""
    return table(("Option", "Type", "Default", "Meaning", "Example", "State"), _option_rows(group))


def _option_rows(group: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for name, field in group.model_fields.items():
        value = EXAMPLES[group][name]
        yield (
            f"`{name}`",
            type_name(field),
            f"`{json.dumps(field.default)}`",
            field.description or "",
            f"`{json.dumps(value)}`",
            f"not yet: {ALWAYS_LATER[group]}" if group in ALWAYS_LATER else state(group, name),
        )


def state(group: type[BaseModel], name: str) -> str:
    """What the validator says of an option at its example: "works", or the capability that is not there yet."""
    given = {name: EXAMPLES[group][name], **PARTNERS.get(name, {})}
    if group is OnDeviceSamplingConfig:
        config = {"neuron_config": {"on_device_sampling_config": given}}
    else:
        config = {"neuron_config" if group is NeuronConfig else "encoder_neuron_config": given}
    return outcome(config)


def outcome(config: dict[str, Any], **settings: Any) -> str:
    """ "works" or "not yet: ..." for a configuration that has no other fault.

    Raises:
        AssertionError: it has another fault.
    """
    try:
        resolve(ServingSettings(**{**OPEN, **settings}), config, {})
    except ConfigurationError as error:
        (fault,) = error.faults
        assert fault.later, str(fault)
        return f"not yet: {fault.rule}"
    return "works"


def type_name(field: FieldInfo) -> str:
    """A field's type in words, such as `list[int]` or null."""
    return " or ".join(dict.fromkeys(_type_words(field.annotation)))


def _type_words(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _type_words(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _type_words(part)
    elif origin is Literal:
        yield from (f'`"{value}"`' for value in get_args(annotation))
    elif origin is tuple:
        yield f"`list[{typing.get_args(annotation)[0].__name__}]`"
    elif annotation is types.NoneType:
        yield "null"
    elif issubclass(annotation, BaseModel):
        yield "dict (below)"
    else:
        yield f"`{annotation.__name__}`"


def variable_table() -> str:
    """Every environment variable: type, default and meaning."""
    return table(("Variable", "Type", "Default", "Meaning"), _variable_rows())


def _variable_rows() -> Iterator[tuple[str, ...]]:
    for variable in envs.VARIABLES.values():
        alias = f" (or `{variable.alias}`)" if variable.alias else ""
        yield (
            f"`{variable.name}`{alias}",
            f"`{variable.type}`",
            _default(variable),
            variable.meaning,
        )


def _default(variable: envs.Variable) -> str:
    if variable.name == "VLLM_CACHE_ROOT":
        return "`~/.cache/vllm`"
    if variable.default is None:
        return "unset"
    return f"`{int(variable.default)}`" if variable.type == "bool" else f"`{variable.default}`"


PARAMETERS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("--max-model-len", "from the model", "Longest sequence, prompt and answer, in tokens.", {"max_model_len": 2048}),
    (
        "--max-num-seqs",
        "vLLM's, or the largest of num_seqs_buckets",
        "Most requests that run at once.",
        {"max_num_seqs": 8, "max_num_seqs_set": True},
    ),
    (
        "--max-num-batched-tokens",
        "vLLM's, or the largest of num_batched_tokens_buckets",
        "Most tokens of a prefill step; no more than max_model_len.",
        {"max_num_batched_tokens": 1024, "max_num_batched_tokens_set": True},
    ),
    ("--block-size", "32", "Tokens per KV block.", {"block_size": 128}),
    ("--num-gpu-blocks-override", "from memory", "KV blocks, instead of a budget.", {"num_gpu_blocks_override": 500}),
    ("--gpu-memory-utilization", "0.9", "Fraction of memory that may be used.", {"gpu_memory_utilization": 0.8}),
    (
        "--no-enable-prefix-caching",
        "caching is on",
        "Do not reuse the KV blocks of shared prefixes.",
        {"enable_prefix_caching": False},
    ),
    ("--enable-prompt-embeds", "off", "Prompts may be embeddings.", {"enable_prompt_embeds": True}),
    (
        "--no-async-scheduling",
        "async scheduling is on",
        "Prepare no step while the one before it runs.",
        {"async_scheduling": False},
    ),
    ("--kv-cache-dtype fp8", "auto", "Keep the KV cache in 8 bits.", {"kv_cache_dtype": "fp8"}),
    ("--tensor-parallel-size N", "1", "Devices that a model is spread over.", {"tensor_parallel_size": 2}),
    ("--data-parallel-size N", "1", "Copies of the model behind one server.", {"data_parallel_size": 2}),
    ("--enable-expert-parallel", "off", "Spread experts over devices.", {"enable_expert_parallel": True}),
    ("--speculative-config", "none", "EAGLE3 drafts; no other method.", {"speculative_method": "eagle3"}),
    ("--kv-transfer-config", "none", "Prefill and decode on different servers.", {"kv_connector": "NixlConnector"}),
    ("--mm-encoder-only", "off", "Build only the encoder of a multimodal model.", {"mm_encoder_only": True}),
    ("--enable-lora", "off", "Serve adapters.", {"enable_lora": True}),
)
"""vLLM's own parameters that have to do with this plugin: flag, default, meaning, and settings that ask for it."""


def parameter_table() -> str:
    """vLLM's own parameters: default, meaning, and whether this release has them."""
    rows = ((f"`{flag}`", default, meaning, outcome({}, **asked)) for flag, default, meaning, asked in PARAMETERS)
    return table(("Flag of `vllm serve`", "Default", "Meaning", "State"), rows)
