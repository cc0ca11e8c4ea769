"""What the registry builds, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from tests.checkpoints import KINDS, make_model
from vllm_neuron.models.errors import UnsupportedArchitectureError, UnsupportedModelError
from vllm_neuron.models.registry import ARCHITECTURES, ONBOARDING_GUIDE, build_model
from vllm_neuron.weights.quantized import QuantizedCheckpointError, quantizes_kv_cache_only

KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
KV_ONLY = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV_SCHEME}


def config(config_class: type[PretrainedConfig] = LlamaConfig, **overrides: Any) -> PretrainedConfig:
    name = config_class.__name__.removesuffix("Config") + "ForCausalLM"
    return config_class(**{"architectures": [name], **overrides})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_table_declares_every_weight_of_the_checkpoint_once(kind: str) -> None:
    model = make_model(kind)
    model.config.architectures = [type(model).__name__]
    built = build_model(model.config)
    sources = [source for spec in built.weight_table.values() for source in spec.sources]
    assert len(sources) == len(set(sources))
    assert set(sources) == {name for name, _ in model.named_parameters()}
    elements = sum(torch.Size(spec.shape).numel() for spec in built.weight_table.values())
    assert elements == sum(parameter.numel() for parameter in model.parameters())


def test_sizes_of_a_model() -> None:
    model = build_model(
        config(Qwen3Config, head_dim=128, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8)
    )
    assert model.architecture == "Qwen3ForCausalLM"
    assert (model.hidden_size, model.vocab_size) == (1024, 151936)
    assert len(model.kv_layers) == 32
    assert (model.kv_layers[0].num_kv_heads, model.kv_layers[0].head_dim, model.kv_layers[0].window) == (8, 128, None)
    assert model.weight_table["layers.0.out"].shape == (1024, 2048)


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (["GptOssForCausalLM"], "GptOssForCausalLM"),
        (["Gemma4ForCausalLM"], "Gemma4ForCausalLM"),
        (["OPTForCausalLM"], "OPTForCausalLM"),
        ([], "no architecture"),
        (None, "no architecture"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_list_of_ours(architectures: Any, message: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=message) as error:
        build_model(SimpleNamespace(architectures=architectures))
    assert all(name in str(error.value) for name in (*ARCHITECTURES, ONBOARDING_GUIDE))


def windows(hf_config: PretrainedConfig) -> list[int | None]:
    return [layer.window for layer in build_model(hf_config).kv_layers]


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config])
def test_sliding_windows_of_qwen(config_class: type[PretrainedConfig]) -> None:
    sizes = {"num_hidden_layers": 4, "sliding_window": 512}
    for first in (0, 1, 3, 4):
        mixed = config(config_class, use_sliding_window=True, max_window_layers=first, **sizes)
        assert windows(mixed) == [None] * first + [512] * (4 - first)
        mixed.layer_types = None
        assert windows(mixed) == [None] * first + [512] * (4 - first)
    assert windows(config(config_class, use_sliding_window=False, max_window_layers=0, **sizes)) == [None] * 4


def test_sliding_windows_of_mistral() -> None:
    assert windows(config(MistralConfig, num_hidden_layers=3, sliding_window=512)) == [512] * 3
    assert windows(config(MistralConfig, num_hidden_layers=3, sliding_window=None)) == [None] * 3


@pytest.mark.parametrize(("max_model_len", "window"), [(512, None), (513, 512), (None, 512)])
def test_a_window_as_long_as_any_sequence_is_none(max_model_len: int | None, window: int | None) -> None:
    model = build_model(config(MistralConfig, num_hidden_layers=1, sliding_window=512), max_model_len)
    assert model.kv_layers[0].window == window


@pytest.mark.parametrize(("kinds", "named"), [(["full_attention", "chunked_attention"], "chunked"), ([], "0 layers")])
def test_other_kinds_of_attention_are_refused(kinds: list[str], named: str) -> None:
    other = config(Qwen2Config, num_hidden_layers=2)
    other.layer_types = kinds
    with pytest.raises(UnsupportedModelError, match=f"not supported yet: layer_types.*{named}.*num_hidden_layers=2"):
        build_model(other)


def test_other_activations_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_act='gelu'"):
        build_model(config(hidden_act="gelu"))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"num_attention_heads=6.*num_key_value_heads=4"):
        build_model(config(num_attention_heads=6, num_key_value_heads=4))


@pytest.mark.parametrize(
    ("declared", "scheme"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors float-quantized"),
        ({**KV_ONLY, "kv_cache_scheme": {**KV_SCHEME, "num_bits": 4}}, "compressed-tensors"),
        ({**KV_ONLY, "kv_cache_scheme": {**KV_SCHEME, "strategy": "attn_head"}}, "compressed-tensors"),
        ({**KV_ONLY, "config_groups": {"g": {"targets": ["Linear"], "weights": KV_SCHEME}}}, "compressed-tensors"),
        ({**KV_ONLY, "config_groups": {"g": {"targets": ["Linear"], "input_activations": KV_SCHEME}}},
         "compressed-tensors"),
        ({**KV_ONLY, "config_groups": {"g": {"targets": ["LlamaAttention"], "output_activations": KV_SCHEME}}},
         "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "modelopt FP8"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"}, "modelopt"),
        ({"bits": 4}, "unnamed"),
        (SimpleNamespace(quant_method=SimpleNamespace(value="awq")), "awq"),
    ],
)  # fmt: skip
def test_a_quantized_checkpoint_is_refused_by_scheme(declared: Any, scheme: str) -> None:
    with pytest.raises(QuantizedCheckpointError, match=f"not supported yet.*scheme '{scheme}'"):
        build_model(config(quantization_config=declared))


@pytest.mark.parametrize(
    "declared",
    [
        KV_ONLY,
        {**KV_ONLY, "config_groups": {"g": {"targets": ["LlamaAttention"], "input_activations": KV_SCHEME}}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
    ],
)
def test_scales_of_the_kv_cache_alone_are_no_quantized_checkpoint(declared: Any) -> None:
    build_model(config(quantization_config=declared))
    assert quantizes_kv_cache_only(config(quantization_config=declared))
    assert not quantizes_kv_cache_only(config())


def test_an_empty_quantization_config_is_none() -> None:
    build_model(config(quantization_config={}))
