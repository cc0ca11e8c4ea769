"""What of a launch the validator is asked about, and what is left out of it on request."""

import json
import shlex
from typing import Any

import pytest

from vllm_neuron.config import Fault
from vllm_neuron.migration import Launch, Option, Verdict, migrate
from vllm_neuron.migration.check import LONGEST, faults_of, settings_of, unchecked, without
from vllm_neuron.migration.launch import Expression


def launch(environment: dict[str, str] | None = None, **options: Any) -> Launch:
    return Launch("vllm serve", {name: Option(name, value) for name, value in options.items()}, environment or {})


@pytest.mark.parametrize(
    ("option", "value", "setting", "expected"),
    [
        ("max_model_len", "4096", "max_model_len", 4096),
        ("max_num_seqs", 8, "max_num_seqs_set", True),
        ("tensor_parallel_size", "2", "tensor_parallel_size", 2),
        ("enable_prefix_caching", False, "enable_prefix_caching", False),
        ("enable_lora", True, "enable_lora", True),
        ("dtype", "half", "dtype", "float16"),
        ("dtype", "torch.float32", "dtype", "float32"),
        ("dtype", "auto", "dtype", "bfloat16"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype", "fp8"),
        ("runner", "pooling", "is_pooling", True),
        ("speculative_config", '{"method": "eagle3"}', "speculative_method", "eagle3"),
        ("speculative_config", {"model": "d"}, "speculative_method", "unnamed"),
        ("kv_transfer_config", {"kv_connector": "c"}, "kv_connector", "c"),
        ("ec_transfer_config", "{}", "ec_connector", "unnamed"),
    ],
)
def test_options_become_settings(option: str, value: Any, setting: str, expected: Any) -> None:
    assert getattr(settings_of(launch(**{option: value})), setting) == expected


def test_what_the_launch_leaves_open_stays_open() -> None:
    settings = settings_of(launch(max_num_seqs=Expression("$N"), num_gpu_blocks_override="10"))
    assert settings.max_model_len == LONGEST and not settings.max_num_seqs_set
    assert settings.num_gpu_blocks_override is None, "how many are enough depends on max_model_len"


def test_expressions_are_not_asked_about_and_are_named() -> None:
    config = {"neuron_config": {"num_seqs_buckets": Expression("sizes()"), "quantized": Expression("q")}}
    found = launch({"VLLM_NEURON_BACKEND": Expression("$B")}, additional_config=config, port=Expression("$P"))
    assert faults_of(found) == ()
    assert unchecked(found) == ("--port", "VLLM_NEURON_BACKEND")


def test_this_process_is_not_part_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_MIN_KV_BUDGET_GIB", "nonsense")
    assert faults_of(launch()) == ()
    (fault,) = faults_of(launch({"VLLM_NEURON_MIN_KV_BUDGET_GIB": "nonsense"}))
    assert fault.option == "VLLM_NEURON_MIN_KV_BUDGET_GIB"


def test_contradictions_need_a_decision() -> None:
    text = (
        "vllm serve m --max-model-len 4096 --max-num-batched-tokens 2048 "
        "--override-neuron-config '{\"context_encoding_buckets\": [128, 4096]}'"
    )
    (row,) = migrate(text).open_rows
    assert row.verdict is Verdict.DECIDE and "must equal max_num_batched_tokens=2048" in row.reason


def fault(option: str) -> Fault:
    return Fault(option, 1, "something", "Remove it.", later=True)


SAMPLING = "additional_config.neuron_config.on_device_sampling_config"


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("tensor_parallel_size", launch({"A": "1"}, additional_config={"neuron_config": {"x": 1, "y": {"z": 1}}})),
        ("A", launch(tensor_parallel_size=2, additional_config={"neuron_config": {"x": 1, "y": {"z": 1}}})),
        (
            "additional_config.neuron_config.y.z",
            launch({"A": "1"}, tensor_parallel_size=2, additional_config={"neuron_config": {"x": 1}}),
        ),
        ("additional_config.neuron_config", launch({"A": "1"}, tensor_parallel_size=2)),
    ],
)
def test_one_option_is_left_out(option: str, expected: Launch) -> None:
    old = launch({"A": "1"}, tensor_parallel_size=2, additional_config={"neuron_config": {"x": 1, "y": {"z": 1}}})
    assert without(old, fault(option)) == expected


def test_weight_quantization_is_left_out_as_a_whole() -> None:
    old = launch(additional_config={"neuron_config": {"quantized": True, "quantization_dtype": "int8"}})
    assert without(old, fault("additional_config.neuron_config.quantization_dtype")) == launch()


def test_a_fault_of_something_else_leaves_the_launch_as_it_is() -> None:
    assert without(launch(port=1), fault("architectures")) == launch(port=1)
    assert without(launch(port=1), fault(SAMPLING)) == launch(port=1)


OLD_NAMES = {
    "context_encoding_buckets": ([128, 256], "num_batched_tokens_buckets"),
    "token_generation_buckets": ([128, 256], "decode_context_length_buckets"),
    "enable_bucketing": (False, "num_seqs_buckets"),
    "pa_num_blocks": (2048, "--num-gpu-blocks-override"),
    "pa_block_size": (64, "--block-size"),
    "is_prefix_caching": (False, "--no-enable-prefix-caching"),
    "async_mode": (False, "--no-async-scheduling"),
    "skip_warmup": (True, None),
    "quantized": (True, '"quantized": true'),
    "seq_len": (4096, "--max-model-len 4096"),
    "batch_size": (8, "--max-num-seqs 8"),
    "tp_degree": (32, "--tensor-parallel-size 32"),
    "on_device_sampling_config": ({"dynamic": True}, '"on_device_sampling_config": {}'),
}


PLACES = (
    "--override-neuron-config {}",
    '--additional-config {{"override_neuron_config": {}}}',
    '--additional-config {{"neuron_config": {}}}',
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_are_found_wherever_users_put_them(place: str, name: str) -> None:
    """Case MIG-1."""
    value, new = OLD_NAMES[name]
    flag, _, config = place.partition(" ")
    text = f"vllm serve m {flag} {shlex.quote(config.format(json.dumps({name: value})))}"
    if name == "enable_bucketing":
        text += " --max-model-len 512 --max-num-seqs 4"
    found = migrate(text, keep_tuning=True)
    assert any(row.old.startswith(name) for row in found.launches[0].rows)
    assert name in ("quantized", "on_device_sampling_config") or name not in found.new
    assert new is None or new in found.new
