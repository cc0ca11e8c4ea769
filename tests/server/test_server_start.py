"""What `vllm serve` says while it starts, and how it refuses to."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import UNKNOWN_VARIABLE
from tests.server.harness import TINY_CONFIG, Server, launch, run_to_end

GRAPH_LINE = re.compile(r"Graph (\d+) of (\d+): (\S+) ready in [\d.]+ s \((\w+ cache hit|compiled)\)")
NUM_GRAPHS = 3 + 3 + 1  # token buckets, batch buckets, prompt logits


def graph_lines(server: Server) -> list[tuple[int, int, str, str]]:
    return [(int(k), int(n), name, how) for k, n, name, how in GRAPH_LINE.findall(server.text())]


def test_servers_that_start_together_compile_each_graph_once_and_are_ready_only_then(
    backend: str, tiny: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    servers = [launch(tiny, backend, tmp_path, cache) for _ in range(2)]
    try:
        servers[0].wait_for_log("Graph 1 of ")
        if len(graph_lines(servers[0])) < NUM_GRAPHS:
            assert servers[0].health() != 200
        compiled: list[str] = []
        for server in servers:
            server.wait_ready()
            lines = graph_lines(server)
            assert [(k, n) for k, n, _, _ in lines] == [(k, NUM_GRAPHS) for k in range(1, NUM_GRAPHS + 1)]
            assert {how for *_, how in lines} <= {"compiled", "local cache hit"}
            mine = [name for _, _, name, how in lines if how == "compiled"]
            counters = server.rpc("graph_statistics")
            assert (counters["compiled"], counters["cached"]) == (len(mine), NUM_GRAPHS - len(mine))
            assert counters["compiles_after_warmup"] == 0
            compiled += mine
        assert len(compiled) == len(set(compiled)) == NUM_GRAPHS
        for server in servers:
            server.stop()
    finally:
        for server in servers:
            server.kill_all()


def test_server_names_its_platform_route_and_configuration(server: Server) -> None:
    text = server.text()
    assert "num_batched_tokens_buckets" in text
    assert "num_seqs_buckets" in text
    assert re.search(r"CPU mode", text)


def test_server_warns_once_that_the_xla_route_is_deprecated(server: Server, backend: str) -> None:
    warnings = [line for line in server.text().splitlines() if "WARNING" in line and "deprecat" in line]
    ours = [line for line in warnings if "VLLM_NEURON_BACKEND" in line]
    assert len(ours) == (1 if backend == "vllm_neuron" else 0)


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "several at once": (
        {"neuron_config": {"num_batched_token_buckets": [128], "num_seqs_buckets": [1, 8], "on_device_sampling": {}}},
        [
            "neuron_config.num_batched_token_buckets",
            "num_batched_tokens_buckets",
            "num_seqs_buckets",
            "on_device_sampling",
        ],
    ),
    "wrong place": ({"num_seqs_buckets": [1, 4]}, ["num_seqs_buckets", "neuron_config"]),
    "name of an older release": (
        {"neuron_config": {"context_encoding_buckets": [128, 512]}},
        ["context_encoding_buckets", "num_batched_tokens_buckets"],
    ),
    "not supported yet": ({"neuron_config": {"quantization": "mxfp8"}}, ["quantization", "not supported yet"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_server_refuses_a_wrong_configuration_before_weights(
    what: str, tiny: Path, cache: Path, tmp_path: Path
) -> None:
    """The checkpoint has no weights: the configuration is refused before anybody looks for them."""
    config, named = WRONG[what]
    model = tmp_path / "no-weights"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors"))
    code, text = run_to_end(model, "neuron_native", tmp_path, cache, config=config)
    assert code not in (0, None)
    for name in named:
        assert name in text, text[-3000:]
    assert "Graph 1 of" not in text
    assert "EngineCore" not in text


def test_server_refuses_an_architecture_by_name(tiny: Path, cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "other"
    shutil.copytree(tiny, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["GemmaForCausalLM"]}))
    code, text = run_to_end(model, "neuron_native", tmp_path, cache)
    assert code not in (0, None)
    for name in ("GemmaForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in text


def test_server_refuses_wrong_environment(tiny: Path, cache: Path, tmp_path: Path) -> None:
    env = {"VLLM_NEURON_MIN_KV_BUDGET_GIB": "much", "VLLM_NEURON_DISABLE_NKI_KERNELS": "perhaps"}
    code, text = run_to_end(tiny, "neuron_native", tmp_path, cache, config=TINY_CONFIG, env=env)
    assert code not in (0, None)
    assert "VLLM_NEURON_MIN_KV_BUDGET_GIB='much'" in text
    assert "VLLM_NEURON_DISABLE_NKI_KERNELS='perhaps'" in text


def test_server_warns_of_unknown_variables(server: Server) -> None:
    warnings = [line for line in server.text().splitlines() if UNKNOWN_VARIABLE in line]
    assert len(warnings) == 1
    assert "NEURON_LIBTORCH_REMOTE_CACHE" in warnings[0]
