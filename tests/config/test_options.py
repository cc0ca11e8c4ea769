"""Reading `additional_config`: known keys, types, ranges, old names and typing errors."""

import copy
import logging
from typing import Any

import pytest

from vllm_neuron.config import EncoderNeuronConfig, NeuronConfig, OnDeviceSamplingConfig, resolve
from vllm_neuron.config import legacy as old

from .builders import ENCODER, NEURON, faults, only_fault, resolved, settings

NEURON_ROWS = {
    "num_batched_tokens_buckets": None,
    "num_seqs_buckets": None,
    "kv_segment_size_buckets": None,
    "decode_context_length_buckets": None,
    "on_device_sampling_config": None,
    "quantization": None,
    "quantized": False,
    "quantization_dtype": None,
}
SAMPLING_ROWS = {"temperature": None, "top_k": None, "top_p": None, "all_greedy": False}
ENCODER_ROWS = {
    "num_encoder_input_buckets": None,
    "encoder_attention_block_size": 2048,
    "max_encoder_seq_len": None,
    "tp_size": 1,
    "dp_size": 1,
    "encoder_cache_num_blocks": None,
    "encoder_cache_min_hold_time_ms": None,
}
MODELS = [(NeuronConfig, NEURON_ROWS), (OnDeviceSamplingConfig, SAMPLING_ROWS), (EncoderNeuronConfig, ENCODER_ROWS)]


@pytest.mark.parametrize(("model", "rows"), MODELS)
def test_every_option_is_known_and_has_its_default(model: Any, rows: dict[str, Any]) -> None:
    assert model().model_dump() == rows
    assert all(field.description for field in model.model_fields.values())


@pytest.mark.parametrize(
    "config", [None, {}, {"neuron_config": None}, {"neuron_config": {}, "encoder_neuron_config": {}}]
)
def test_leaving_everything_out(config: Any) -> None:
    assert faults(config) == []


@pytest.mark.parametrize("option", [*NEURON_ROWS, *ENCODER_ROWS])
def test_null_is_the_same_as_leaving_out(option: str) -> None:
    group = "neuron_config" if option in NEURON_ROWS else "encoder_neuron_config"
    assert faults({group: {option: None}}) == []


@pytest.mark.parametrize(
    ("option", "value", "where", "rule"),
    [
        *(
            (option, value, where, rule)
            for option in ("num_batched_tokens_buckets", "num_seqs_buckets", "decode_context_length_buckets")
            for value, where, rule in (
                ([], "", "must not be empty"),
                (["256"], "[0]", "must be an integer"),
                ([128, True], "[1]", "must be an integer"),
                ([128.0], "[0]", "must be an integer"),
                ([None], "[0]", "must be an integer"),
                ("[128, 256]", "", "must be a list"),
                (256, "", "must be a list"),
                ({"128": 1}, "", "must be a list"),
                ([0, 256], "", "at least 1"),
                ([-128, 256], "", "at least 1"),
                ([256, 128], "", "ascending"),
                ([128, 128, 256], "", "ascending"),
            )
        ),
        ("kv_segment_size_buckets", [], "", "must not be empty"),
        ("kv_segment_size_buckets", 512, "", "must be a list"),
        ("kv_segment_size_buckets", [300], "", "one of 512, 1024, 2048, 4096, 8192"),
        ("kv_segment_size_buckets", [16384], "", "one of 512, 1024, 2048, 4096, 8192"),
        ("kv_segment_size_buckets", [512, 1024], "", "single segment size"),
        ("decode_context_length_buckets", [100], "", "divisible by 128"),
        ("quantization", "int3", "", "'mxfp4' or 'mxfp8'"),
        ("quantization", 4, "", "'mxfp4' or 'mxfp8'"),
        ("quantization_dtype", "fp4", "", "'int8', 'fp8' or 'f8e4m3'"),
        ("quantized", "true", "", "without quotes"),
        ("quantized", 1, "", "without quotes"),
    ],
)
def test_types_and_ranges(option: str, value: Any, where: str, rule: str) -> None:
    fault = only_fault({"neuron_config": {option: value}})
    assert fault.option == f"{NEURON}.{option}{where}"
    assert rule in fault.rule
    assert fault.rule.startswith(("must", "every value", "only")), "our words, not those of a library"
    assert fault.value == (value[int(where[1:-1])] if where else value)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("temperature", "warm", "numeric string"),
        ("temperature", True, "must be a number"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", "nan", "finite"),
        ("temperature", "inf", "finite"),
        ("top_k", "5.5", "integer"),
        ("top_k", 2.0, "integer"),
        ("top_k", -2, "1 to 256, or 0 or -1"),
        ("top_p", 0, "above 0"),
        ("top_p", "1.5", "at most 1"),
        ("all_greedy", "true", "without quotes"),
        ("all_greedy", 1, "without quotes"),
    ],
)
def test_sampling_values_are_checked(option: str, value: Any, rule: str) -> None:
    (bad,) = faults({"neuron_config": {"on_device_sampling_config": {option: value}}})
    assert bad.option == f"{NEURON}.on_device_sampling_config.{option}" and rule in bad.rule


@pytest.mark.parametrize(
    "config", [{"temperature": "0.7"}, {"temperature": 0}, {"top_k": "50", "top_p": "0.9"}, {"top_k": -1}, {"top_p": 1}]
)
def test_sampling_numbers_may_be_strings(config: Any) -> None:
    sampling = OnDeviceSamplingConfig.model_validate(config)
    assert {name: float(value) for name, value in config.items()} == {name: getattr(sampling, name) for name in config}


@pytest.mark.parametrize("value", [[], "greedy", True])
def test_a_group_must_be_a_dictionary(value: Any) -> None:
    assert any("dictionary" in fault.rule for fault in faults({"neuron_config": value}))
    assert any("dictionary" in fault.rule for fault in faults({"encoder_neuron_config": value}))
    assert any("dictionary" in f.rule for f in faults({"neuron_config": {"on_device_sampling_config": value}}))
    assert any("dictionary" in fault.rule for fault in faults(value))


@pytest.mark.parametrize(
    ("config", "path", "suggestion"),
    [
        ({"neuron_config": {"num_batched_token_buckets": [128]}}, f"{NEURON}.num_batched_token_buckets",
         f"{NEURON}.num_batched_tokens_buckets"),
        ({"neuron_config": {"num-seqs-buckets": [1]}}, f"{NEURON}.num-seqs-buckets", f"{NEURON}.num_seqs_buckets"),
        ({"num_seqs_buckets": [1]}, "additional_config.num_seqs_buckets", f"{NEURON}.num_seqs_buckets"),
        ({"neuron_confg": {}}, "additional_config.neuron_confg", "additional_config.neuron_config"),
        ({"encoder_neuron_config": {"default_image_width": 640}}, f"{ENCODER}.default_image_width", ENCODER),
        ({"encoder_neuron_config": {"num_seqs_buckets": [1]}}, f"{ENCODER}.num_seqs_buckets",
         f"{NEURON}.num_seqs_buckets"),
        ({"neuron_config": {"tp_size": 2}}, f"{NEURON}.tp_size", f"{ENCODER}.tp_size"),
        ({"neuron_config": {"all_greedy": True}}, f"{NEURON}.all_greedy",
         f"{NEURON}.on_device_sampling_config.all_greedy"),
        ({"neuron_config": {"block_size": 128}}, f"{NEURON}.block_size", "--block-size"),
        ({"neuron_config": {"kv_cache_dtype": "fp8"}}, f"{NEURON}.kv_cache_dtype", "--kv-cache-dtype"),
        ({"num_gpu_blocks_override": 9}, "additional_config.num_gpu_blocks_override", "--num-gpu-blocks-override"),
        ({"neuron_config": {1: 2}}, f"{NEURON}.1", NEURON),
    ],
)  # fmt: skip
def test_unknown_and_misplaced_keys_name_their_path_and_the_right_one(config: Any, path: str, suggestion: str) -> None:
    fault = only_fault(config)
    assert fault.option == path
    assert suggestion in fault.remedy


def test_unknown_sampling_keys() -> None:
    (unknown,) = faults({"neuron_config": {"on_device_sampling_config": {"temprature": 1}}})
    assert unknown.option.endswith("on_device_sampling_config.temprature")
    assert f"{NEURON}.on_device_sampling_config.temperature" in unknown.remedy


MIGRATED = {
    "context_encoding_buckets": "num_batched_tokens_buckets",
    "token_generation_buckets": "decode_context_length_buckets",
    "enable_bucketing": "num_batched_tokens_buckets",
    "pa_num_blocks": "--num-gpu-blocks-override",
    "pa_block_size": "--block-size",
    "is_prefix_caching": "--enable-prefix-caching",
    "async_mode": "--async-scheduling",
    "skip_warmup": "Remove it",
    "seq_len": "--max-model-len",
    "batch_size": "--max-num-seqs",
    "tp_degree": "--tensor-parallel-size",
    "speculation_length": "--speculative-config",
    "kv_cache_quant": "--kv-cache-dtype fp8",
}


@pytest.mark.parametrize("place", ["neuron_config", "override_neuron_config", "encoder_neuron_config", None])
@pytest.mark.parametrize(("name", "new"), MIGRATED.items())
def test_old_names_give_the_new_one_wherever_they_stand(place: str | None, name: str, new: str) -> None:
    config = {name: 1} if place is None else {place: {name: 1}}
    fault = faults(config)[-1]
    assert fault.option == f"additional_config.{place}.{name}" if place else f"additional_config.{name}"
    assert new in fault.remedy
    assert not fault.later


def test_the_old_quantization_pair_is_refused_wherever_it_stands() -> None:
    pair = {"quantized": True, "quantization_dtype": "int8"}
    (group,) = faults({"override_neuron_config": pair})
    assert group.option == "additional_config.override_neuron_config" and NEURON in group.remedy
    (later,) = faults({"neuron_config": pair})
    assert later.later and later.option == f"{NEURON}.quantization_dtype"


@pytest.mark.parametrize("name", sorted(old.OPTIONS))
def test_every_old_name_is_refused(name: str) -> None:
    assert name not in NEURON_ROWS and name not in ENCODER_ROWS
    assert "another release" in only_fault({"neuron_config": {name: 1}}).rule


def test_the_old_group_names_each_of_its_keys() -> None:
    group, old_key, unknown = faults({"override_neuron_config": {"seq_len": 1, "num_seqs_buckets": [1], "typo": 1}})
    assert group.option == "additional_config.override_neuron_config" and NEURON in group.remedy
    assert "--max-model-len" in old_key.remedy
    assert unknown.option == "additional_config.override_neuron_config.typo"


def test_the_old_group_is_searched_to_its_depths() -> None:
    group, dynamic = faults({"override_neuron_config": {"on_device_sampling_config": {"dynamic": True, "top_k": 5}}})
    assert NEURON in group.remedy
    assert dynamic.option == "additional_config.override_neuron_config.on_device_sampling_config.dynamic"
    assert "every request" in dynamic.remedy


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("num_vision_tokens_buckets", "num_encoder_input_buckets"),
        ("vision_attention_block_size", "encoder_attention_block_size"),
        ("max_vision_seq_len", "max_encoder_seq_len"),
    ],
)
def test_the_old_vision_group(name: str, new: str) -> None:
    group, key = faults({"vision_neuron_config": {name: 2048, "tp_size": 1}})
    assert ENCODER in group.remedy
    assert key.option == f"additional_config.vision_neuron_config.{name}" and f"{ENCODER}.{new}" in key.remedy


@pytest.mark.parametrize("name", sorted(old.SAMPLING))
def test_old_sampling_names(name: str) -> None:
    fault = faults({"neuron_config": {"on_device_sampling_config": {name: True}}})[0]
    assert fault.option == f"{NEURON}.on_device_sampling_config.{name}" and "another release" in fault.rule


@pytest.mark.parametrize("group", ["neuron_config", "encoder_neuron_config"])
@pytest.mark.parametrize("value", [True, False])
def test_a_nested_language_model_only_warns_and_has_no_effect(group: str, value: Any) -> None:
    result = resolve(settings(), {group: {"mm_language_model_only": value}}, {})
    (notice,) = result.notices
    assert notice.level == logging.WARNING
    assert f"additional_config.{group}.mm_language_model_only" in notice.text
    assert "additional_config.mm_language_model_only" in notice.text


def test_language_model_only_must_be_a_boolean() -> None:
    assert only_fault({"mm_language_model_only": "true"}).option == "additional_config.mm_language_model_only"
    assert faults({"mm_language_model_only": False}) == []


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("num_encoder_input_buckets", ["2048"], "must be an integer"),
        ("num_encoder_input_buckets", [4096, 2048], "ascending"),
        ("encoder_attention_block_size", 0, "at least 1"),
        ("encoder_attention_block_size", "2048", "must be an integer"),
        ("max_encoder_seq_len", 0, "at least 1"),
        ("tp_size", True, "must be an integer"),
        ("dp_size", 0, "at least 1"),
        ("encoder_cache_num_blocks", -1, "at least 1"),
        ("encoder_cache_min_hold_time_ms", "100", "must be a number"),
        ("encoder_cache_min_hold_time_ms", -1.0, "0 or more"),
    ],
)
def test_encoder_types_and_ranges(option: str, value: Any, rule: str) -> None:
    fault = faults({"encoder_neuron_config": {option: value}})[0]
    assert fault.option.startswith(f"{ENCODER}.{option}") and rule in fault.rule


def test_the_users_dictionary_is_left_alone() -> None:
    config = {"neuron_config": {"num_seqs_buckets": [1, 4], "on_device_sampling_config": {"x": 1}}, "typo": 1}
    before = copy.deepcopy(config)
    faults(config)
    assert config == before


def test_tuples_serve_as_lists() -> None:
    assert resolved({"num_seqs_buckets": (1, 4)}).num_seqs_buckets == (1, 4)


def test_a_hold_time_of_zero_is_a_value() -> None:
    assert only_fault({"encoder_neuron_config": {"encoder_cache_min_hold_time_ms": 0}}).later


def test_a_key_like_no_other_gets_all_keys_of_its_group() -> None:
    remedy = only_fault({"neuron_config": {"zzz": 1}}).remedy
    assert all(name in remedy for name in NEURON_ROWS)
