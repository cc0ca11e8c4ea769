"""The mapping tables, row by row: what each rule says of its example is what happens to it."""

import dataclasses
from typing import Any

import pytest

from tests.migration.published import label
from vllm_neuron.config import legacy
from vllm_neuron.config.options import NeuronConfig
from vllm_neuron.migration.arguments import as_words
from vllm_neuron.migration.launch import Launch, Option, Row, Verdict
from vllm_neuron.migration.mapping import map_launch
from vllm_neuron.migration.rules import FIELDS, FLAGS, SAMPLING, VARIABLES, VISION, Rule

BASE = {"model": "m", "tensor_parallel_size": 32, "max_model_len": 4096, "max_num_seqs": 8}
COMPANIONS = {"quantization_dtype": {"quantized": True}}
"""What else has to be set for a rule's verdict."""
STAYS = ("NEURON_COMPILED_ARTIFACTS",)
"""Names that are still there while a person has to decide on their values."""


def mapped(
    fields: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    keep_tuning: bool = False,
    **options: Any,
) -> tuple[Launch, dict[str, Row]]:
    """The new launch of a small old one, and its rows by name."""
    if fields is not None:
        options["override_neuron_config"] = fields
    every = {name: Option(name, value) for name, value in {**BASE, **options}.items()}
    new, rows = map_launch(Launch("vllm serve", every, environment or {}), keep_tuning)
    return new, {label(row): row for row in rows}


def config_of(launch: Launch) -> dict[str, Any]:
    option = launch.options.get("additional_config")
    return option.value if option else {}


def places(launch: Launch) -> set[str]:
    """Everything that a launch sets, in the words that rules use for where a setting goes."""
    found = set(launch.environment)
    for option in launch.options.values():
        found |= {option.flag, " ".join(as_words(option))}
    for group, values in config_of(launch).items():
        found |= {f"{group}.{name}" for name in values}
        sampling = values.get("on_device_sampling_config") or {}
        found |= {f"on_device_sampling_config.{name}" for name in sampling}
    return found


def check(rule: Rule, row: Row, launch: Launch) -> None:
    assert row.verdict is rule.verdict
    assert row.reason
    if row.verdict in (Verdict.KEPT, Verdict.RENAMED):
        assert rule.new in places(launch)
        assert row.new == rule.new
    elif rule.old not in STAYS:
        assert rule.old not in launch.options and rule.old not in launch.environment
        for values in config_of(launch).values():
            assert rule.old not in values


@pytest.mark.parametrize("rule", FLAGS.values(), ids=lambda rule: rule.old)
def test_flag(rule: Rule) -> None:
    launch, rows = mapped(**{rule.old: rule.example})
    (row,) = (row for name, row in rows.items() if name.removeprefix("--no-").strip("-").replace("-", "_") == rule.old)
    if row.verdict is Verdict.DECIDE and rule.new:
        assert rule.new in places(launch)
        launch = dataclasses.replace(launch, options={k: o for k, o in launch.options.items() if k != rule.old})
    check(rule, row, launch)


@pytest.mark.parametrize("rule", VARIABLES.values(), ids=lambda rule: rule.old)
def test_variable(rule: Rule) -> None:
    launch, rows = mapped(environment={rule.old: rule.example})
    check(rule, rows[rule.old], launch)


@pytest.mark.parametrize("rule", FIELDS.values(), ids=lambda rule: rule.old)
def test_field(rule: Rule) -> None:
    launch, rows = mapped({**COMPANIONS.get(rule.old, {}), rule.old: rule.example})
    check(rule, rows[rule.old], launch)


@pytest.mark.parametrize("rule", SAMPLING.values(), ids=lambda rule: rule.old)
def test_sampling_field(rule: Rule) -> None:
    launch, rows = mapped({"on_device_sampling_config": {rule.old: rule.example}})
    check(rule, rows[f"sampling.{rule.old}"], launch)
    assert "on_device_sampling_config" in config_of(launch)["neuron_config"]


@pytest.mark.parametrize("rule", VISION.values(), ids=lambda rule: rule.old)
def test_vision_field(rule: Rule) -> None:
    launch, rows = mapped({"vision_config": {rule.old: rule.example}})
    check(rule, rows[f"vision.{rule.old}"], launch)
    assert "neuron_config" not in config_of(launch)


@pytest.mark.parametrize("name", [*legacy.OPTIONS, *legacy.SAMPLING])
def test_every_old_name_that_the_validator_knows_has_a_rule(name: str) -> None:
    """The validator refuses these names at start; what it says there has to be done here."""
    assert name in {**FIELDS, **SAMPLING, **VISION}


@pytest.mark.parametrize("name", NeuronConfig.model_fields)
def test_names_of_today_are_never_taken_for_old_ones(name: str) -> None:
    assert name == "on_device_sampling_config" or FIELDS[name].verdict is Verdict.KEPT


V, D, N = Verdict.RENAMED, Verdict.DROPPED, Verdict.DECIDE
VALUES: list[tuple[dict[str, Any], str, Verdict, dict[str, Any]]] = [
    ({"seq_len": 2048}, "seq_len", N, {}),
    ({"torch_dtype": "torch.float16"}, "torch_dtype", V, {"dtype": "float16"}),
    ({"max_context_length": 8192}, "max_context_length", N, {}),
    ({"async_mode": False}, "async_mode", V, {"async_scheduling": False}),
    ({"is_prefix_caching": False}, "is_prefix_caching", V, {"enable_prefix_caching": False}),
    ({"kv_cache_quant": False}, "kv_cache_quant", D, {}),
    ({"quantized": False, "quantization_dtype": "int8"}, "quantization_dtype", D, {}),
    ({"quantized": True}, "quantized", Verdict.KEPT, {"quantized": True, "quantization_dtype": "int8"}),
    ({"quantized": True, "quantization_dtype": "f8e5m2"}, "quantization_dtype", Verdict.UNSUPPORTED, {}),
    ({"ep_degree": 1}, "ep_degree", D, {}),
    ({"attention_dp_degree": 1}, "attention_dp_degree", D, {}),
    ({"logical_nc_config": 2}, "logical_nc_config", D, {}),
    ({"cast_type": "config"}, "cast_type", D, {}),
    ({"attention_dtype": None}, "attention_dtype", D, {}),
    ({"enable_eagle_speculation": False}, "enable_eagle_speculation", D, {}),
    ({"lora_config": None}, "lora_config", D, {}),
    ({"enable_bucketing": False}, "enable_bucketing", V,
     {"num_batched_tokens_buckets": [4096], "num_seqs_buckets": [8]}),
    ({"context_encoding_buckets": [512, 128, 512]}, "context_encoding_buckets", V,
     {"num_batched_tokens_buckets": [128, 512]}),
    ({"context_encoding_buckets": "all"}, "context_encoding_buckets", N, {}),
    ({"token_generation_buckets": [32, 300, 4096]}, "token_generation_buckets", V,
     {"decode_context_length_buckets": [128, 384]}),
    ({"token_generation_buckets": [4096]}, "token_generation_buckets", D, {}),
    ({"on_device_sampling_config": None}, "on_device_sampling_config", D, {}),
    ({"on_device_sampling_config": {"do_sample": False}}, "sampling.do_sample", V,
     {"on_device_sampling_config": {"all_greedy": True}}),
    ({"on_device_sampling_config": {"do_sample": False, "dynamic": True}}, "sampling.do_sample", D,
     {"on_device_sampling_config": {}}),
    ({"on_device_sampling_config": {"global_topk": 256}}, "sampling.global_topk", D,
     {"on_device_sampling_config": {}}),
    ({"on_device_sampling_config": {"global_topk": 64, "top_k": 5}}, "sampling.global_topk", D,
     {"on_device_sampling_config": {"top_k": 5}}),
    ({"on_device_sampling_config": {"beam_width": 4}}, "sampling.beam_width", N, {"on_device_sampling_config": {}}),
    ({"max_model_len": 4096}, "max_model_len", D, {}),
    ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization", V, {"gpu_memory_utilization": 0.5}),
    ({"context_encoding_buckets": [128.5]}, "context_encoding_buckets", N, {}),
    ({"sequence_paralel_enabled": True}, "sequence_paralel_enabled", N, {}),
    ({"text_config": {"enable-bucketing": False}}, "enable_bucketing", V,
     {"num_batched_tokens_buckets": [4096], "num_seqs_buckets": [8]}),
    ({"vision_config": {"tp_degree": 1}}, "vision.tp_degree", D, {}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name", "verdict", "expected"), VALUES, ids=lambda value: str(value)[:60])
def test_values_of_fields(fields: dict[str, Any], name: str, verdict: Verdict, expected: dict[str, Any]) -> None:
    launch, rows = mapped(fields)
    assert rows[name].verdict is verdict
    options = {name: option.value for name, option in launch.options.items() if name != "additional_config"}
    assert {**options, **config_of(launch).get("neuron_config", {})} == {**BASE, **expected}


FLAG_VALUES: list[tuple[dict[str, Any], Verdict, dict[str, Any]]] = [
    ({"device": "cpu"}, Verdict.DECIDE, {}),
    ({"enable_prefix_caching": False}, Verdict.KEPT, {"enable_prefix_caching": False}),
    ({"async_scheduling": False}, Verdict.KEPT, {"async_scheduling": False}),
    ({"enable_chunked_prefill": True}, Verdict.DROPPED, {}),
    ({"block_size": "32"}, Verdict.DROPPED, {}),
    ({"block_size": 4096}, Verdict.DROPPED, {}),
    ({"quantization": "fp8"}, Verdict.KEPT, {"quantization": "fp8"}),
    ({"task": "embed"}, Verdict.RENAMED, {"runner": "pooling"}),
    ({"task": "transcription"}, Verdict.DECIDE, {}),
    ({"distributed_executor_backend": "mp"}, Verdict.KEPT, {"distributed_executor_backend": "mp"}),
    ({"limit_mm_per_prompt": "image=2,video=1"}, Verdict.RENAMED, {"limit_mm_per_prompt": {"image": 2, "video": 1}}),
    ({"limit_mm_per_prompt": {"image": 2}}, Verdict.KEPT, {"limit_mm_per_prompt": {"image": 2}}),
    ({"worker_cls": "my.package.Worker"}, Verdict.DECIDE, {}),
    ({"guided_decoding_backend": "auto"}, Verdict.DROPPED, {}),
    ({"speculative_config": {"method": "eagle3", "model": "d"}}, Verdict.KEPT,
     {"speculative_config": {"method": "eagle3", "model": "d"}}),
    ({"speculative_config": {"method": "ngram"}}, Verdict.UNSUPPORTED, {}),
    ({"speculative_config": "nonsense"}, Verdict.DECIDE, {}),
    ({"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}, Verdict.KEPT,
     {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}),
    ({"trust_remote_code": True}, Verdict.KEPT, {"trust_remote_code": True}),
    ({"quantization": None}, Verdict.DROPPED, {}),
]  # fmt: skip


@pytest.mark.parametrize(("option", "verdict", "expected"), FLAG_VALUES, ids=lambda value: str(value)[:60])
def test_values_of_flags(option: dict[str, Any], verdict: Verdict, expected: dict[str, Any]) -> None:
    launch, rows = mapped(**option)
    assert list(rows.values())[-1].verdict is verdict
    assert {name: value.value for name, value in launch.options.items()} == {**BASE, **expected}


def test_tuning_is_kept_when_asked_for() -> None:
    launch, rows = mapped(keep_tuning=True, block_size=64, num_gpu_blocks_override=900)
    assert (launch.options["block_size"].value, launch.options["num_gpu_blocks_override"].value) == (64, 900)
    launch, rows = mapped({"pa_block_size": 64, "pa_num_blocks": 900}, keep_tuning=True)
    assert (launch.options["block_size"].value, launch.options["num_gpu_blocks_override"].value) == (64, 900)
    assert {rows[name].verdict for name in ("pa_block_size", "pa_num_blocks")} == {Verdict.KEPT}


def test_a_default_is_left_out_even_when_tuning_is_kept() -> None:
    launch, _ = mapped(keep_tuning=True, block_size=32)
    assert "block_size" not in launch.options


@pytest.mark.parametrize("name", ["VLLM_NEURON_CPU_MOD", "NEURON_LIBTORCH_REMOTE"])
def test_variables_that_look_like_ours_and_are_not(name: str) -> None:
    launch, rows = mapped(environment={name: "1"})
    assert rows[name].verdict is Verdict.DECIDE and "Did you mean" in rows[name].reason
    assert launch.environment == {name: "1"}


def test_settings_of_today_go_over_as_they_are() -> None:
    config = {
        "neuron_config": {"num_seqs_buckets": [8], "quantization": "mxfp4"},
        "encoder_neuron_config": {"tp_size": 2},
        "mm_language_model_only": True,
    }
    launch, rows = mapped(additional_config=config)
    assert config_of(launch) == config
    assert {row.verdict for row in rows.values()} == {Verdict.KEPT}


def test_groups_of_an_earlier_release_are_renamed() -> None:
    launch, _ = mapped(additional_config={"vision_neuron_config": {"num_vision_tokens_buckets": [2048]}})
    assert config_of(launch) == {"encoder_neuron_config": {"num_encoder_input_buckets": [2048]}}
