"""What `vllm serve` says while it starts, and how it refuses to."""

import re
import shutil
from pathlib import Path
from typing import Any

from tests.caches import new_cache
from tests.server.conftest import UNKNOWN_VARIABLE
from tests.server.harness import Server, launch, run_to_end
from tests.server.stand_in_compiler import StandInCompiler

GRAPH_LINE = re.compile(r"Graph (\d+) of (\d+): (\S+) ready in [\d.]+ s \((\w+ cache hit|compiled)\)")
NUM_GRAPHS = 3 + 3 + 1  # token buckets, batch buckets, prompt logits


def graph_lines(server: Server) -> list[tuple[int, int, str, str]]:
    return [(int(k), int(n), name, how) for k, n, name, how in GRAPH_LINE.findall(server.text())]


def test_servers_that_start_together_compile_each_graph_once_and_are_ready_only_then(
    tiny: Path, tmp_path: Path
) -> None:
    """On one route: what one server leaves to the other is decided by the cache, which knows nothing of routes."""
    cache = new_cache(tmp_path / "cache")
    compiler = StandInCompiler(tmp_path / "bin", cache)
    servers = [launch(tiny, "neuron_native", tmp_path, cache, env=compiler.env) for _ in range(2)]
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
        assert compiler.builds() == 1, "of the kernels"
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


WRONG: dict[str, Any] = {
    "neuron_config": {
        "num_batched_token_buckets": [128],
        "num_seqs_buckets": [1, 8],
        "on_device_sampling": {},
        "context_encoding_buckets": [128, 512],
        "quantization": "mxfp8",
    },
    "num_batched_tokens_buckets": [128],
}
WRONG_ENVIRONMENT = {"VLLM_NEURON_MIN_KV_BUDGET_GIB": "much", "VLLM_NEURON_DISABLE_NKI_KERNELS": "perhaps"}
OPTIONS = "additional_config.neuron_config"
NAMED = (
    "VLLM_NEURON_MIN_KV_BUDGET_GIB='much'",
    "VLLM_NEURON_DISABLE_NKI_KERNELS='perhaps'",
    f"{OPTIONS}.num_batched_token_buckets=[128]: is not an option. Did you mean {OPTIONS}.num_batched_tokens_buckets?",
    f"{OPTIONS}.num_seqs_buckets=[1, 8]: the largest value must equal max_num_seqs=4",
    f"{OPTIONS}.on_device_sampling={{}}: is not an option",
    f"{OPTIONS}.context_encoding_buckets=[128, 512]: is the name of another release",
    f"additional_config.num_batched_tokens_buckets=[128]: is not an option. Did you mean {OPTIONS}.",
    "not supported yet: weight quantization",
)


def test_server_refuses_a_wrong_configuration_and_environment_before_weights(
    tiny: Path, cache: Path, tmp_path: Path
) -> None:
    """The checkpoint has no weights: all faults are told before anybody looks for them.

    A misspelt name, a value, a name of another release, a place, a thing to come, variables. That each is told alone:
    tests/config/; an architecture that is unknown, by the same way: tests/plugin/test_platform.py.
    """
    model = tmp_path / "no-weights"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors"))
    code, text = run_to_end(model, "neuron_native", tmp_path, cache, config=WRONG, env=WRONG_ENVIRONMENT)
    assert code not in (0, None)
    for name in NAMED:
        assert name in text, text[-3000:]
    assert "Graph 1 of" not in text
    assert "EngineCore" not in text


def test_server_warns_of_unknown_variables(server: Server) -> None:
    warnings = [line for line in server.text().splitlines() if UNKNOWN_VARIABLE in line]
    assert len(warnings) == 1
    assert "NEURON_LIBTORCH_REMOTE_CACHE" in warnings[0]
