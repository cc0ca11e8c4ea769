"""What the platform makes of vLLM's configuration."""

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import CompilationMode, CUDAGraphMode, KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from tests.checkpoints import checkpoint, write_checkpoint
from vllm_neuron.plugin.models import served_model
from vllm_neuron.plugin.platform import SCHEDULER, WORKER, NeuronPlatform
from vllm_neuron.plugin.settings import resolved_config

BUCKETS = {"neuron_config": {"num_batched_tokens_buckets": [128, 256], "num_seqs_buckets": [1, 2]}}


def make_config(path: Path | None = None, **args: Any) -> VllmConfig:
    defaults = {"model": str(path or checkpoint("llama")), "dtype": "float32", "max_model_len": 1024}
    return EngineArgs(**{**defaults, **args}).create_engine_config()


def test_vllm_agrees_with_the_resolved_configuration() -> None:
    config = make_config(additional_config=BUCKETS)
    resolved = resolved_config(config)
    assert (resolved.max_num_batched_tokens, resolved.max_num_seqs) == (256, 2)
    assert config.scheduler_config.max_num_batched_tokens == 256 and config.scheduler_config.max_num_seqs == 2
    assert config.cache_config.block_size == resolved.block_size == 32
    assert config.cache_config.enable_prefix_caching and config.scheduler_config.enable_chunked_prefill
    assert config.parallel_config.worker_cls == WORKER and config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.parallel_config.distributed_executor_backend == "uni"
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert not config.scheduler_config.async_scheduling
    assert sum("Async scheduling needs on-device sampling" in notice.text for notice in resolved.notices) == 1


def test_limits_that_the_user_set_are_not_changed_but_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens") as fault:
        make_config(additional_config=BUCKETS, max_num_batched_tokens=512, max_num_seqs=8)
    assert "num_seqs_buckets" in str(fault.value), "all faults together"


def test_a_block_size_of_the_users_is_kept() -> None:
    assert make_config(block_size=16).cache_config.block_size == 16


def test_defaults_do_not_depend_on_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_config()
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 1 << 40}))
    large = make_config()
    assert resolved_config(small) == resolved_config(large)


def test_the_resolved_configuration_travels() -> None:
    config = make_config(additional_config=BUCKETS)
    resolved = resolved_config(config)
    sent = pickle.loads(pickle.dumps(config))
    assert resolved_config(sent) == resolved and sent.use_v2_model_runner == resolved.v2_model_runner
    assert config.compute_hash() == sent.compute_hash()


def test_resolving_again_changes_nothing() -> None:
    config = make_config(additional_config=BUCKETS)
    resolved, before = resolved_config(config), copy.deepcopy(config.scheduler_config)
    current_platform.check_and_update_config(config)
    assert resolved_config(config) is resolved and config.scheduler_config == before
    again = resolved_config(replace(config))
    unequal = {"options", "notices"}
    for name, value in vars(resolved).items():
        assert name in unequal or getattr(again, name) == value, name
    assert BUCKETS == {"neuron_config": {"num_batched_tokens_buckets": [128, 256], "num_seqs_buckets": [1, 2]}}


def test_a_configuration_without_a_model_passes() -> None:
    config = VllmConfig()
    with pytest.raises(RuntimeError, match="no resolved Neuron configuration"):
        resolved_config(config)


@pytest.mark.parametrize(("value", "v2"), [(None, True), ("0", False), ("1", True), ("true", True), ("off", False)])
def test_the_runner_is_one_answer_for_all(monkeypatch: pytest.MonkeyPatch, value: str | None, v2: bool) -> None:
    import vllm.envs

    if value is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    config = make_config()
    assert config.use_v2_model_runner is v2 and resolved_config(config).v2_model_runner is v2
    if value is not None:
        assert v2 is vllm.envs.VLLM_USE_V2_MODEL_RUNNER


def test_a_scheduler_of_the_users_is_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    own = "vllm.v1.core.sched.scheduler.Scheduler"
    config = make_config(scheduler_cls=own)
    assert config.scheduler_config.scheduler_cls == own
    assert any(record.levelname == "WARNING" and own in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"load_format": "pt"}, ["load_format", "'pt'", "safetensors"]),
        ({"cpu_offload_gb": 1}, ["not supported yet", "cpu_offload_gb"]),
        ({"kv_cache_memory_bytes": 1 << 30}, ["not supported yet", "kv_cache_memory_bytes"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype='fp8_e5m2'", "auto", "fp8, fp8_e4m3"]),
        ({"enable_lora": True}, ["not supported yet", "LoRA"]),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, ["Unsupported speculative"]),
        ({"additional_config": {"neuron_config": {"num_seq_buckets": [1]}}}, ["num_seq_buckets", "num_seqs_buckets"]),
    ],
)
def test_what_is_not_there_is_refused_before_weights(args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as fault:
        make_config(**args)
    assert all(word in str(fault.value) for word in words), fault.value


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    (path / "config.json").write_text((path / "config.json").read_text().replace("LlamaFor", "GemmaFor"))
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="GemmaForCausalLM") as fault:
        make_config(path)
    assert all(name in str(fault.value) for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"))


def with_windows(*kinds: str, **args: Any) -> VllmConfig:
    """A Llama of layers of these kinds, with a window of 256 tokens."""
    layer_types = [f"{kind}_attention" for kind in kinds]
    return make_config(hf_overrides={"sliding_window": 256, "layer_types": layer_types}, **args)


def test_mixed_windows_need_the_hybrid_block_manager() -> None:
    with_windows("sliding", "sliding", disable_hybrid_kv_cache_manager=True)
    with pytest.raises(ValueError, match=r"disable_hybrid_kv_cache_manager=True.*Remove --disable-hybrid-kv-cache"):
        with_windows("full", "sliding", disable_hybrid_kv_cache_manager=True)
    with pytest.raises(ValueError, match="kv_events_config"):
        with_windows("full", "sliding", kv_events_config=KVEventsConfig())
    config = with_windows("full", "sliding")
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager
    assert [layer.window for layer in served_model(config).kv_layers] == [None, 256]


def test_contexts_as_long_as_the_window_need_no_window() -> None:
    config = with_windows("sliding", "sliding", disable_sliding_window=True, max_model_len=None)
    assert config.model_config.max_model_len == 256
    assert [layer.window for layer in served_model(config).kv_layers] == [None, None]


@pytest.mark.parametrize(
    ("backend", "device", "absent", "words"),
    [
        ("neuron_native", "trn2", "torch_neuronx", ["torch-neuronx", "AWS's package index", "VLLM_NEURON_CPU_MODE=1"]),
        ("vllm_neuron", "trn3", "neuronxcc", ["neuronx-cc", "AWS's package index", "VLLM_NEURON_CPU_MODE=1"]),
        ("vllm_neuron", None, "torch_xla", ["pip install torch-xla==2.9.0", "unset VLLM_NEURON_BACKEND"]),
    ],
)
def test_a_missing_package_is_named_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str | None, absent: str, words: list[str]
) -> None:
    monkeypatch.setenv("VLLM_NEURON_BACKEND", backend)
    monkeypatch.setitem(sys.modules, absent, None)  # type: ignore[arg-type]
    if device:
        monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
        monkeypatch.setattr("vllm_neuron.plugin.hardware.device_target", lambda: device)
    with pytest.raises(RuntimeError, match=f"VLLM_NEURON_BACKEND={backend} does not work here") as fault:
        make_config()
    assert all(word in str(fault.value) for word in words), fault.value


def test_the_native_route_wants_no_package_of_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_xla", "jax", "jaxlib", "torch_neuronx", "neuronxcc", "nki"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    make_config()


def test_a_prompt_without_room_for_an_answer_is_refused() -> None:
    config = make_config(max_model_len=64)
    params = SamplingParams()
    current_platform.validate_request([], params, {"prompt_token_ids": [5] * 63})
    with pytest.raises(ValueError, match="max_model_len is 64"):
        current_platform.validate_request([], params, {"prompt_token_ids": [5] * 64})
    assert config.model_config.max_model_len == NeuronPlatform.max_model_len == 64
