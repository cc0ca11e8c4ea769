"""A checkpoint whose model_type transformers does not know either: two entry points, and vLLM configures an engine."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import tokenizer

PACKAGE = """
from transformers import AutoConfig, LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_of_the_tests"

def register():
    AutoConfig.register("own_of_the_tests", OwnConfig, exist_ok=True)

def build(hf_config, max_model_len):
    from vllm_neuron.models import llama
    return llama.build(hf_config, max_model_len)
"""

ENTRY_POINTS = """
[vllm_neuron.models]
OwnForCausalLM = own_of_the_tests:build
[vllm.general_plugins]
own_of_the_tests = own_of_the_tests:register
"""

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    info = tmp_path / "site" / "own_of_the_tests-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-of-the-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "site" / "own_of_the_tests.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    model = tmp_path / "model"
    tokenizer().save_pretrained(model)
    named = {"model_type": "own_of_the_tests", "architectures": ["OwnForCausalLM"], "torch_dtype": "float32"}
    (model / "config.json").write_text(json.dumps({**SIZES, **HEADS, **named}))
    return model


def test_vllm_configures_an_engine_for_it(own_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.plugins
    from vllm.engine.arg_utils import EngineArgs

    # vLLM loads its general plugins once in a process, and this one is new.
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    config = EngineArgs(model=str(own_model), max_model_len=256, max_num_seqs=2).create_engine_config()
    assert config.model_config.architecture == "OwnForCausalLM"
    assert type(config.model_config.hf_config).__name__ == "OwnConfig"
