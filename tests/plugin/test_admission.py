"""What on-device sampling admits, and the defaults it gives to requests."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.checkpoints import checkpoint, write_checkpoint
from tests.plugin.test_platform import make_config
from vllm_neuron.config import OnDeviceSamplingConfig
from vllm_neuron.plugin import admission
from vllm_neuron.plugin.admission import Admission
from vllm_neuron.plugin.platform import NeuronPlatform

SAMPLES = Admission(OnDeviceSamplingConfig())
GREEDY = Admission(OnDeviceSamplingConfig(all_greedy=True), {"temperature": 0.6, "top_p": 0.9, "do_sample": True})


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 256, "top_p": 0.5, "n": 3},
        {"top_k": -1},
        {"logprobs": 0},
        {"logprobs": 20},
        {"allowed_token_ids": [3]},
        {"stop": ["a"], "stop_token_ids": [5], "ignore_eos": True, "max_tokens": 3},
        {"bad_words": [], "logit_bias": {}},
    ],
)
def test_admitted(params: dict[str, Any]) -> None:
    SAMPLES.check(SamplingParams(**params))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 0),
        ("min_p", 0.05),
        ("presence_penalty", -0.1),
        ("frequency_penalty", 0.1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ["a"]),
        ("min_tokens", 1),
        ("prompt_logprobs", 0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("top_k", 257),
    ],
)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"does not support {name}=.*on_device_sampling_config") as refusal:
        SAMPLES.check(SamplingParams(**{name: value}))
    assert (refusal.value.parameter, refusal.value.value) == (name, value)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"temperature": 1.0}, "temperature"),
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": 0.6, "top_p": 0.8}, "top_p"),
        ({"temperature": 0.6, "top_k": 5}, "top_k"),
        ({"temperature": 0.6, "n": 2}, "n"),
    ],
)
def test_argmax_only_graphs_refuse_sampling(params: dict[str, Any], name: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"^Only support greedy sampling: .*asks for {name}=") as refusal:
        GREEDY.check(SamplingParams(**params))
    assert refusal.value.parameter == name


def test_argmax_only_graphs_admit_the_models_own_defaults_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    admission._logged.clear()
    with caplog.at_level(logging.WARNING, "vllm_neuron"):
        for params in ({"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.5}):
            GREEDY.check(SamplingParams(**params))
    assert len(caplog.records) == 1 and "generation_config" in caplog.text
    with pytest.raises(VLLMValidationError, match="logprobs=1"):
        GREEDY.check(SamplingParams(temperature=0.0, logprobs=1))
    with pytest.raises(VLLMValidationError, match="min_p"):
        GREEDY.check(SamplingParams(temperature=0.6, min_p=0.1))


def test_that_unlimited_means_256_candidates_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    admission._logged.clear()
    with caplog.at_level(logging.INFO, "vllm_neuron"):
        for params in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0}, {"top_k": -1}):
            SAMPLES.check(SamplingParams(**params))
    assert [record.levelname for record in caplog.records] == ["INFO"] and "256 most likely" in caplog.text


def defaults(on_device: dict[str, Any] | None, path: Path | None = None, **args: Any) -> dict[str, Any]:
    """What vLLM's front end gives to requests that leave it unset."""
    config = make_config(path, additional_config={"neuron_config": {"on_device_sampling_config": on_device}}, **args)
    return config.model_config.get_diff_sampling_param()


def with_generation_config(folder: Path, **values: Any) -> Path:
    path = write_checkpoint(folder)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **values}))
    return path


def test_defaults_of_requests_come_from_the_option() -> None:
    assert defaults({"temperature": "0.7", "top_k": "5", "top_p": 0.9}) == {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
    }
    assert NeuronPlatform.admission == Admission(
        OnDeviceSamplingConfig.model_validate({"temperature": "0.7", "top_k": "5", "top_p": 0.9}),
        NeuronPlatform.admission.model_defaults if NeuronPlatform.admission else {},
    )
    assert defaults({}) == {}
    assert defaults({"all_greedy": True}) == {"temperature": 0.0}
    assert defaults(None) == {} and NeuronPlatform.admission is None


def test_defaults_of_the_model_stay_unless_they_cannot_be_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_generation_config(tmp_path, temperature=0.6, top_k=20, repetition_penalty=1.05)
    with caplog.at_level(logging.WARNING, "vllm_neuron"):
        assert defaults({"top_k": 5}, path) == {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.0}
    assert "repetition_penalty=1.05" in caplog.text
    assert NeuronPlatform.admission is not None and NeuronPlatform.admission.model_defaults["temperature"] == 0.6
    assert defaults({"all_greedy": True}, path)["temperature"] == 0.0
    assert defaults({}, path, generation_config="vllm") == {}
    assert defaults(None, path)["repetition_penalty"] == 1.05


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ({"override_generation_config": {"temperature": 0.3}}, "override_generation_config.temperature"),
        ({"override_generation_config": {"min_p": 0.3}}, "override_generation_config.min_p"),
        ({"override_generation_config": {"top_k": 300}}, "override_generation_config.top_k"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode"),
        ({"logits_processors": ["some.Processor"]}, "logits_processors"),
    ],
)
def test_options_of_vllm_that_graphs_cannot_do_are_refused_at_start(args: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match=option):
        defaults({"temperature": 0.5}, **args)


def test_requests_are_checked_where_vllm_asks_the_platform() -> None:
    defaults({})
    with pytest.raises(VLLMValidationError, match="seed=4"):
        NeuronPlatform.validate_request(None, SamplingParams(seed=4), {"prompt_token_ids": [3]})
    make_config(checkpoint("llama"))
    NeuronPlatform.validate_request(None, SamplingParams(seed=4), {"prompt_token_ids": [3]})
