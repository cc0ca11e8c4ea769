"""A server on a machine that has never compiled anything, but was given the graphs (CCH-1)."""

import subprocess
from pathlib import Path

from tests.caches import new_cache
from tests.server.harness import BIN, MODEL_NAME, clean_environment, serving

ARGS = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "128")
NUM_GRAPHS = 1 + 2 + 1  # token buckets, batch buckets, prompt logits


def test_server_finds_what_was_compiled_elsewhere(tiny: Path, tmp_path: Path) -> None:
    """The number of KV blocks is left to both: they must come to the same.

    On the XLA route, in the cache that machines share; artifacts on the native route are a block of README.md.
    """
    shared, here, there = tmp_path / "shared", new_cache(tmp_path / "here"), new_cache(tmp_path / "there")
    env = {"NEURON_LIBTORCH_REMOTE_CACHE": str(shared)}
    ours = {"VLLM_NEURON_BACKEND": "vllm_neuron", "VLLM_NEURON_CPU_MODE": "1", "VLLM_CACHE_ROOT": str(there)}
    compiled = subprocess.run(
        [BIN / "vllm-neuron", "compile", tiny, *ARGS, "--served-model-name", MODEL_NAME, "--port", "8000"],
        env={**clean_environment(), **ours, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert compiled.returncode == 0, compiled.stderr
    assert compiled.stdout.splitlines()[-1] == f"graphs: {NUM_GRAPHS}, compiled: {NUM_GRAPHS}, cached: 0"

    strict = {**env, "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
    with serving(tiny, "vllm_neuron", tmp_path, here, args=ARGS, config=None, env=strict) as server:
        assert server.text().count("(remote cache hit)") == NUM_GRAPHS
        statistics = server.rpc("graph_statistics")
        assert (statistics["compiled"], statistics["cached"]) == (0, NUM_GRAPHS)
        answer = server.client.completions.create(model=MODEL_NAME, prompt="abc", max_tokens=3, temperature=0)
        assert answer.usage.completion_tokens == 3
        assert server.rpc("graph_statistics")["compiles_after_warmup"] == 0
