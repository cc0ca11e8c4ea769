"""What is refused: capabilities that come later, contradictions, values that are not supported at all."""

import logging
from typing import Any

import pytest

from .builders import ENCODER, NEURON, faults, only_fault, resolved, settings

SAMPLING = f"{NEURON}.on_device_sampling_config"
ONLY = "additional_config.mm_language_model_only"


@pytest.mark.parametrize(
    ("config", "env", "changes", "option", "capability"),
    [
        ({"neuron_config": {"quantization": "mxfp4"}}, {}, {}, f"{NEURON}.quantization", "weight quantization"),
        ({"neuron_config": {"quantization": "mxfp8"}}, {}, {}, f"{NEURON}.quantization", "weight quantization"),
        ({"neuron_config": {"quantized": True, "quantization_dtype": "int8"}}, {}, {}, f"{NEURON}.quantization_dtype",
         "weight quantization"),
        ({"neuron_config": {"quantized": True, "quantization_dtype": "f8e4m3"}}, {}, {},
         f"{NEURON}.quantization_dtype", "weight quantization"),
        ({"encoder_neuron_config": {"num_encoder_input_buckets": [2048, 8192]}}, {}, {}, ENCODER,
         "multimodal encoders"),
        ({"encoder_neuron_config": {"encoder_attention_block_size": 128}}, {}, {}, ENCODER, "multimodal encoders"),
        ({"encoder_neuron_config": {"max_encoder_seq_len": 4096}}, {}, {}, ENCODER, "multimodal encoders"),
        ({"encoder_neuron_config": {"encoder_cache_num_blocks": 4}}, {}, {}, ENCODER, "multimodal encoders"),
        ({"encoder_neuron_config": {"encoder_cache_min_hold_time_ms": 100}}, {}, {}, ENCODER, "multimodal encoders"),
        ({"mm_language_model_only": True}, {}, {}, ONLY, "language-model-only"),
        (None, {}, {"mm_encoder_only": True}, "mm_encoder_only", "encoder-only"),
        (None, {}, {"is_multimodal": True, "architectures": ("Qwen3VLForConditionalGeneration",)}, "architectures",
         "multimodal models"),
        (None, {}, {"ec_connector": "ECExampleConnector"}, "ec_connector", "encoder-disaggregated"),
        (None, {}, {"quantization": "fp8"}, "quantization", "quantized weights"),
        (None, {}, {"quantization": "compressed-tensors"}, "quantization", "quantized weights"),
        (None, {}, {"tensor_parallel_size": 32}, "tensor_parallel_size", "tensor parallelism"),
        (None, {}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size", "pipeline parallelism"),
        (None, {}, {"data_parallel_size": 2}, "data_parallel_size", "data parallelism"),
        (None, {}, {"context_parallel_size": 2}, "context_parallel_size", "context parallelism"),
        (None, {}, {"enable_expert_parallel": True}, "enable_expert_parallel", "expert parallelism"),
        (None, {}, {"speculative_method": "eagle3"}, "speculative_config.method", "speculative decoding"),
        (None, {}, {"kv_connector": "NixlConnector"}, "kv_transfer_config.kv_connector", "disaggregated inference"),
        (None, {}, {"enable_lora": True}, "enable_lora", "LoRA"),
        (None, {}, {"is_pooling": True}, "runner", "pooling"),
    ],
)  # fmt: skip
def test_not_supported_yet(
    config: Any, env: dict[str, str], changes: dict[str, Any], option: str, capability: str
) -> None:
    fault = only_fault(config, env, **changes)
    assert fault.later and fault.option == option
    assert str(fault).startswith("not supported yet: ") and capability in str(fault)
    assert f"({option}=" in str(fault), "option and value are named"
    assert fault.remedy.endswith(".")


@pytest.mark.parametrize(
    ("config", "env", "changes", "option", "words"),
    [
        (None, {}, {"quantization": "neuron_quant"}, "quantization",
         ["Keep it unset", "neuron_config", "calibrated checkpoint"]),
        (None, {}, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype", ["auto, bfloat16, fp8, fp8_e4m3"]),
        (None, {}, {"kv_cache_dtype": "bfloat16", "dtype": "float32"}, "kv_cache_dtype", ["auto, float32"]),
        (None, {}, {"dtype": "float64"}, "dtype", ["bfloat16, float16, float32"]),
        (None, {}, {"scheduling_policy": "priority"}, "scheduling_policy", ["fcfs"]),
        (None, {}, {"speculative_method": "ngram"}, "speculative_config.method",
         ["Unsupported speculative decoding method", "eagle3"]),
        ({"mm_language_model_only": True}, {}, {"mm_encoder_only": True}, ONLY,
         ["either vision-only or language-only"]),
        ({"neuron_config": {"quantized": True}}, {}, {}, NEURON, ["need each other", "int8"]),
        ({"neuron_config": {"quantization_dtype": "int8"}}, {}, {}, NEURON, ["need each other"]),
        ({"neuron_config": {"quantization": "mxfp4", "quantized": True, "quantization_dtype": "int8"}}, {}, {},
         f"{NEURON}.quantization", ["cannot be combined"]),
        ({"neuron_config": {"on_device_sampling_config": {"all_greedy": True, "temperature": 0.7}}}, {}, {}, SAMPLING,
         ["argmax-only"]),
        ({"encoder_neuron_config": {"max_encoder_seq_len": 1024}}, {}, {}, f"{ENCODER}.max_encoder_seq_len",
         ["encoder_attention_block_size=2048"]),
        ({"encoder_neuron_config": {"tp_size": 3}}, {}, {"tensor_parallel_size": 2}, f"{ENCODER}.tp_size",
         ["world size 2"]),
        ({"encoder_neuron_config": {"dp_size": 4}}, {}, {"tensor_parallel_size": 2}, f"{ENCODER}.dp_size",
         ["world size 2"]),
        ({"encoder_neuron_config": {"tp_size": 2, "dp_size": 2}}, {}, {"tensor_parallel_size": 2}, ENCODER,
         ["tp_size * dp_size", "world size 2"]),
        (None, {"VLLM_NEURON_CPU_COMPILE": "1"}, {}, "VLLM_NEURON_CPU_COMPILE", ["NEURON_PLATFORM_TARGET_OVERRIDE"]),
        (None, {"VLLM_NEURON_CPU_COMPILE": "1", "VLLM_NEURON_CPU_MODE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"},
         {}, "VLLM_NEURON_CPU_COMPILE", ["VLLM_NEURON_CPU_MODE=1"]),
        (None, {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
                "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"},
         {}, "VLLM_NEURON_CPU_COMPILE", ["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1"]),
        (None, {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}, {},
         "NEURON_PLATFORM_TARGET_OVERRIDE", ["'trn1'", "trn2, trn3", "gen3, gen4"]),
        (None, {"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1", "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}, {},
         "VLLM_NEURON_DISABLE_WARMUP_COMPILE", ["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"]),
        (None, {"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1", "NEURON_COMPILED_ARTIFACTS": "/models/a"}, {},
         "NEURON_COMPILED_ARTIFACTS", ["'/models/a'", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1"]),
        (None, {"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1", "NEURON_LIBTORCH_REMOTE_CACHE": "/shared"}, {},
         "NEURON_LIBTORCH_REMOTE_CACHE", ["'/shared'", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1"]),
        (None, {"NKI_SIMULATOR": "1"}, {}, "NKI_SIMULATOR", ["needs VLLM_NEURON_CPU_MODE=1"]),
        (None, {"VLLM_NEURON_CPU_MODE": "ja"}, {}, "VLLM_NEURON_CPU_MODE", ["'ja'", "true/false"]),
        (None, {"VLLM_NEURON_COMPILATION_TIMEOUT": "soon"}, {}, "VLLM_NEURON_COMPILATION_TIMEOUT", ["whole number"]),
        (None, {"VLLM_NEURON_RESERVED_HEADROOM_GIB": "abc"}, {}, "VLLM_NEURON_RESERVED_HEADROOM_GIB", ["'abc'"]),
    ],
)  # fmt: skip
def test_contradictions_and_unsupported_values(
    config: Any, env: dict[str, str], changes: dict[str, Any], option: str, words: list[str]
) -> None:
    (fault,) = [fault for fault in faults(config, env, **changes) if not fault.later]
    assert fault.option == option
    for word in words:
        assert word in str(fault)


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ({"NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": "4"}, {}),
        ({"NEURON_LIBTORCH_COMPILATION_TIMEOUT": "60"}, {}),
        ({"NEURON_COMPILED_ARTIFACTS": "/models/a", "NEURON_LIBTORCH_REMOTE_CACHE": "/shared"}, {}),
        ({"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, {}),
        ({"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"}, {}),
        ({"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}, {}),
        ({"VLLM_NEURON_CPU_COMPILE": "0"}, {}),
        ({}, {"kv_cache_dtype": "bfloat16", "dtype": "bfloat16"}),
        ({}, {"dtype": "float32"}),
        ({}, {"dtype": "float16"}),
    ],
)
def test_supported(env: dict[str, str], changes: dict[str, Any]) -> None:
    assert faults({}, env, **changes) == []


@pytest.mark.parametrize("second", [{"quantized": True}, {"quantization_dtype": "int8"}])
def test_half_of_the_second_quantization_form_beside_the_first(second: dict[str, Any]) -> None:
    found = [fault for fault in faults({"neuron_config": {"quantization": "mxfp8", **second}}) if not fault.later]
    assert [fault.option for fault in found] == [f"{NEURON}.quantization"]


def test_an_encoder_cap_of_one_block() -> None:
    assert only_fault({"encoder_neuron_config": {"max_encoder_seq_len": 2048}}).later


def test_quantized_false_is_the_default() -> None:
    assert faults({"neuron_config": {"quantized": False}}) == []


@pytest.mark.parametrize(
    ("env", "changes", "level", "words"),
    [
        ({}, {"enforce_eager": True}, logging.WARNING, ["enforce_eager has no effect"]),
        ({}, {"async_scheduling": True}, logging.INFO, ["synchronous", SAMPLING]),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, {}, logging.WARNING, ["VLLM_NEURON_CPU_COMPILE"]),
        ({"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_ATTN_MASK_TORCH": "1"}, {}, logging.INFO,
         ["VLLM_NEURON_ATTN_MASK_TORCH"]),
        ({"VLLM_NEURON_CPU_MODE": "1", "NKI_SIMULATOR": "1"}, {}, logging.WARNING,
         ["NKI_SIMULATOR=1", "for tiny models"]),
        ({"NKI_SIMULATOR": "1", "VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_DISABLE_NKI_KERNELS": "1"}, {},
         logging.WARNING, ["NKI_SIMULATOR has no effect"]),
        ({"NKI_PRECISE_FP": "0"}, {}, logging.WARNING, ["NKI_PRECISE_FP has no effect"]),
        ({"VLLM_NEURON_BACKEND": "xla"}, {}, logging.WARNING, ["'xla'", "native"]),
        ({"VLLM_NEURON_REMOTE_CACHE": "/r"}, {}, logging.WARNING, ["NEURON_LIBTORCH_REMOTE_CACHE"]),
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, {"architectures": ("GptOssForCausalLM",)}, logging.WARNING,
         ["VLLM_USE_V2_MODEL_RUNNER=1", "GptOssForCausalLM"]),
        ({"VLLM_NEURON_RESERVED_HEADROOM_GIB": "0"}, {"gpu_memory_utilization": 0.9}, logging.INFO,
         ["gpu_memory_utilization", "from 0.9 to 1"]),
        ({"VLLM_NEURON_RESERVED_HEADROOM_GIB": "4", "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "0.5"},
         {"gpu_memory_utilization": 1.0}, logging.WARNING, ["VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION has no effect"]),
    ],
)  # fmt: skip
def test_notices(env: dict[str, str], changes: dict[str, Any], level: int, words: list[str]) -> None:
    (notice,) = resolved({}, env, **changes).notices
    assert notice.level == level
    for word in words:
        assert word in notice.text


def test_an_encoder_cap_beside_a_list_of_buckets_is_no_fault_in_itself() -> None:
    config = {"encoder_neuron_config": {"num_encoder_input_buckets": [2048], "max_encoder_seq_len": 64}}
    assert only_fault(config).later


def test_long_values_are_shortened_in_messages() -> None:
    fault = only_fault({"neuron_config": {"typo": list(range(1000))}})
    assert len(str(fault)) < 700


def test_settings_without_anything_special_have_no_notices() -> None:
    assert resolved(**vars(settings())).notices == ()
