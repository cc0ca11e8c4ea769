"""The resolved configuration as a whole: decisions, purity, errors and the report."""

import dataclasses
import logging
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron import envs
from vllm_neuron.config import (
    ConfigurationError,
    OnDeviceSamplingConfig,
    ResolvedConfig,
    ServingSettings,
    effective_report,
    log_notices,
    resolve,
)
from vllm_neuron.config.resolution import DENSE_ARCHITECTURES
from vllm_neuron.models.registry import ARCHITECTURES

from .builders import faults, resolved, settings
from .test_envs import ROWS as VARIABLES
from .test_options import ENCODER_ROWS, NEURON_ROWS


def test_the_first_example_of_the_reference() -> None:
    """Every limit but max_model_len is left open; only the size of the machine stands in the way."""
    config = {
        "neuron_config": {
            "num_batched_tokens_buckets": [128, 256, 512, 1024, 2048, 4096],
            "num_seqs_buckets": [1, 2, 4, 8],
        }
    }
    serving = settings(
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_batched_tokens_set=False,
        max_num_seqs=256,
        max_num_seqs_set=False,
        block_size=None,
    )
    result = resolve(serving, config, {})
    assert (result.max_num_batched_tokens, result.max_num_seqs, result.block_size) == (4096, 8, 32)


def test_the_second_example_of_the_reference() -> None:
    serving = settings(max_model_len=131072, max_num_batched_tokens=2048, max_num_batched_tokens_set=False)
    result = resolve(serving, {"neuron_config": {"num_batched_tokens_buckets": [256, 512, 1024]}}, {})
    assert result.max_num_batched_tokens == 1024


COMPLETE = {
    "num_seqs_buckets": [1, 2, 4, 8],
    "kv_segment_size_buckets": [2048],
    "num_batched_tokens_buckets": [2048],
}


def test_the_complete_example_of_the_reference() -> None:
    changes: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "max_num_batched_tokens_set": False,
        "block_size": 128,
        "enable_prompt_embeds": True,
    }
    result = resolved(COMPLETE, **changes)
    assert result.enable_prompt_embeds
    assert (result.max_num_batched_tokens, result.kv_segment_size, result.block_size) == (2048, 2048, 128)

    later = {"kv_cache_dtype": "fp8", "tensor_parallel_size": 32}
    assert resolved(COMPLETE, **changes, kv_cache_dtype="fp8").fp8_kv_cache and not result.fp8_kv_cache
    config = {"neuron_config": {**COMPLETE, "on_device_sampling_config": {"all_greedy": True}}}
    env = {"NEURON_COMPILED_ARTIFACTS": "/models/cache", "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": "4"}
    found = faults(config, env, **changes, **later)
    assert all(fault.later for fault in found)
    assert {fault.rule for fault in found} == {"tensor parallelism"}


def test_memory_policy() -> None:
    default = resolved()
    assert (default.kv_headroom_gib, default.kv_cap_fraction, default.kv_minimum_gib) == (None, 0.30, 1.0)
    assert default.gpu_memory_utilization == settings().gpu_memory_utilization
    env = {"VLLM_NEURON_RESERVED_HEADROOM_GIB": "0", "VLLM_NEURON_MIN_KV_BUDGET_GIB": "0.01"}
    explicit = resolved({}, env)
    assert (explicit.kv_headroom_gib, explicit.kv_minimum_gib, explicit.gpu_memory_utilization) == (0.0, 0.01, 1.0)
    assert resolved({}, {"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "0.5"}).kv_cap_fraction == 0.5
    assert resolved(num_gpu_blocks_override=64).num_gpu_blocks_override == 64


@pytest.mark.parametrize(
    ("runner", "architecture", "v2"),
    [
        *(("", name, True) for name in DENSE_ARCHITECTURES),
        ("", "GptOssForCausalLM", False),
        *((value, name, False) for value in ("0", "off") for name in ("LlamaForCausalLM", "GptOssForCausalLM")),
        *((value, name, True) for value in ("1", "TRUE") for name in ("LlamaForCausalLM", "GptOssForCausalLM")),
    ],
)
def test_model_runner(runner: str, architecture: str, v2: bool) -> None:
    env = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    assert resolved({}, env, architectures=(architecture,)).v2_model_runner is v2


def test_dense_architectures_are_ones_that_there_are() -> None:
    assert set(DENSE_ARCHITECTURES) <= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("VLLM_NEURON_BACKEND", "vllm_neuron", "backend", "vllm_neuron"),
        ("VLLM_NEURON_BACKEND", "xla", "backend", "neuron_native"),
        ("VLLM_NEURON_CPU_MODE", "yes", "cpu_mode", True),
        ("VLLM_NEURON_DISABLE_NKI_KERNELS", "1", "disable_nki_kernels", True),
        ("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1", "disable_warmup_compile", True),
        ("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "1", "disable_compile_cache", True),
    ],
)
def test_variables_reach_the_result(variable: str, text: str, attribute: str, value: Any) -> None:
    assert getattr(resolved({}, {variable: text}), attribute) == value
    assert getattr(resolved(), attribute) in (False, "neuron_native")


def test_cpu_compile_mode_has_a_target_and_no_other_mode_has_one() -> None:
    target = {"NEURON_PLATFORM_TARGET_OVERRIDE": "gen4"}
    result = resolved({}, {"VLLM_NEURON_CPU_COMPILE": "1", **target})
    assert (result.cpu_compile, result.platform_target, result.cpu_mode) == (True, "trn3", False)
    assert "CPU compile mode for trn3" in effective_report(result, []).splitlines()[0]
    result = resolved({}, target)
    assert (result.cpu_compile, result.platform_target) == (False, None)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    assert resolve(settings()).cpu_mode
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "0")
    assert not resolve(settings()).cpu_mode


def test_async_scheduling_is_off_and_says_how_to_turn_it_on() -> None:
    result = resolved(async_scheduling=True)
    assert result.async_scheduling is False
    (notice,) = result.notices
    assert notice.level == logging.INFO and "on_device_sampling_config" in notice.text
    assert resolved(async_scheduling=False).notices == ()


def test_on_device_sampling_says_what_it_does_not_do() -> None:
    def said(**sampling: Any) -> list[str]:
        return [notice.text for notice in resolved({"on_device_sampling_config": sampling}).notices]

    assert resolved({"on_device_sampling_config": {"top_k": "5"}}).on_device_sampling == OnDeviceSamplingConfig(top_k=5)
    (text,) = said()
    assert "256 most likely tokens" in text
    assert said(all_greedy=True) == []
    (text,) = said(all_greedy=True, top_k=5)
    assert "top_k has no effect" in text


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("on_device", [{}, {"all_greedy": True}, None])
def test_async_scheduling_is_on_by_default_where_graphs_sample(on_device: dict[str, Any] | None, wanted: bool) -> None:
    found = resolved({"on_device_sampling_config": on_device}, async_scheduling=wanted)
    assert found.async_scheduling is (wanted and on_device is not None)
    told = [notice.text for notice in found.notices if "Scheduling is synchronous" in notice.text]
    assert len(told) == (wanted and on_device is None)


def applied(serving: ServingSettings, result: ResolvedConfig) -> ServingSettings:
    """The settings after the plugin has written the decisions back."""
    return dataclasses.replace(
        serving,
        max_num_batched_tokens=result.max_num_batched_tokens,
        max_num_seqs=result.max_num_seqs,
        block_size=result.block_size,
        gpu_memory_utilization=result.gpu_memory_utilization,
        async_scheduling=result.async_scheduling,
    )


def decisions(result: ResolvedConfig) -> ResolvedConfig:
    return dataclasses.replace(result, notices=(), options=())


@given(
    length=st.integers(1, 9000),
    tokens=st.integers(1, 9000),
    tokens_set=st.booleans(),
    seqs=st.integers(1, 300),
    seqs_set=st.booleans(),
    neuron=st.fixed_dictionaries(
        {},
        optional={
            "num_batched_tokens_buckets": st.sets(st.integers(1, 9000), max_size=4).map(sorted),
            "num_seqs_buckets": st.sets(st.integers(1, 300), max_size=4).map(sorted),
            "kv_segment_size_buckets": st.none() | st.lists(st.sampled_from([512, 2048]), max_size=1),
            "decode_context_length_buckets": st.lists(st.sampled_from([128, 256, 4096]), max_size=2),
        },
    ),
    headroom=st.sampled_from(["", "0", "2"]),
)
def test_resolving_again_decides_the_same(
    length: int, tokens: int, tokens_set: bool, seqs: int, seqs_set: bool, neuron: dict[str, Any], headroom: str
) -> None:
    """Either faults, or lists that fit the limits, and the same once more when the decisions have been written back."""
    serving = settings(
        max_model_len=length,
        max_num_batched_tokens=tokens,
        max_num_batched_tokens_set=tokens_set,
        max_num_seqs=seqs,
        max_num_seqs_set=seqs_set,
        block_size=None,
        async_scheduling=True,
    )
    env = {"VLLM_NEURON_RESERVED_HEADROOM_GIB": headroom}
    config = {"neuron_config": neuron}
    try:
        first = resolve(serving, config, env)
    except ConfigurationError as error:
        assert error.faults
        return
    assert first == resolve(serving, config, env)
    assert first.num_batched_tokens_buckets[-1] == first.max_num_batched_tokens <= length
    assert first.num_seqs_buckets[-1] == first.max_num_seqs <= first.max_num_batched_tokens
    assert first.decode_context_length_buckets[-1] == length
    if tokens_set:
        assert first.max_num_batched_tokens == min(tokens, length)
    if seqs_set:
        assert first.max_num_seqs == seqs
    again = applied(serving, first)
    assert decisions(resolve(again, config, env)) == decisions(first)
    fixed = dataclasses.replace(again, max_num_batched_tokens_set=True, max_num_seqs_set=True)
    assert decisions(resolve(fixed, config, env)) == decisions(first)


def test_the_error_has_a_line_for_each_fault_and_travels_between_processes() -> None:
    with pytest.raises(ConfigurationError, match="2 faults") as raised:
        resolve(settings(enable_lora=True), {"typo": 1}, {})
    assert issubclass(ConfigurationError, ValueError)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3 and lines[1].startswith("  - additional_config.typo=1: ")
    assert lines[2].startswith("  - not supported yet: LoRA adapters (enable_lora=True). ")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert str(copy) == str(raised.value) and copy.faults == raised.value.faults


def test_the_result_travels_between_processes() -> None:
    result = resolved({"num_seqs_buckets": [1, 4]}, {"VLLM_NEURON_BACKEND": "xla"})
    assert pickle.loads(pickle.dumps(result)) == result


def test_resolving_logs_nothing_and_the_notices_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm_neuron")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="vllm_neuron"):
            result = resolved({"mm_language_model_only": True}, async_scheduling=True)
            assert not caplog.records
            log_notices(result)
    finally:
        logger.removeHandler(caplog.handler)
    logged = {(record.levelno, record.getMessage()) for record in caplog.records}
    assert logged == set(result.notices) and len(logged) == 2


def test_the_report_shows_every_option_and_variable() -> None:
    env = {"VLLM_NEURON_CPU_MODE": "yes", "VLLM_NEURON_COMPILATION_TIMEOUT": "5"}
    result = resolved({"num_seqs_buckets": [1, 4]}, {"VLLM_NEURON_CPU_MODE": "yes"})
    text = effective_report(result, envs.effective(env))
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines()[1:]}
    expected = {
        *(f"neuron_config.{name}" for name in NEURON_ROWS),
        *(f"encoder_neuron_config.{name}" for name in ENCODER_ROWS),
        "mm_language_model_only",
        "mm_encoder_only",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "num_gpu_blocks_override",
        "block_size",
        "kv_cache_dtype",
        "async_scheduling",
        "enable_prompt_embeds",
        *(name for name, _, _ in VARIABLES),
        "VLLM_CACHE_ROOT",
    }
    assert expected <= set(shown)
    assert shown["neuron_config.num_seqs_buckets"].split() == ["[1,", "4]", "set"]
    assert shown["neuron_config.num_batched_tokens_buckets"].split() == ["[128,", "256]", "derived"]
    assert shown["neuron_config.kv_segment_size_buckets"] == "-"
    assert shown["VLLM_NEURON_CPU_MODE"].split() == ["true", "environment"]
    assert shown["NEURON_LIBTORCH_COMPILATION_TIMEOUT"].split() == ["5", "VLLM_NEURON_COMPILATION_TIMEOUT"]
    assert "backend neuron_native" in text and "CPU mode" in text and "V2" in text
