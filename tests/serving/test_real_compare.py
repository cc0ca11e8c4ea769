"""`vllm-neuron compare` with real servers of both routes, one of which computes something else."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.checkpoints import checkpoint

FLAGS = ("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")
WORKLOAD = ("--rounds", "1", "--no-cold", "--no-accuracy", "--requests", "3", "--concurrency", "2")
LENGTHS = ("--prompt-tokens", "48", "--output-tokens", "6", "--greedy-tokens", "8")


def test_real_routes_that_differ_fail_and_show_where(tmp_path: Path) -> None:
    different = "--hf-overrides '{\"rope_theta\": 3.0}'"
    command = [sys.executable, "-c", "from vllm_neuron.cli.main import main; main()", "compare", checkpoint("llama")]
    command += [
        *FLAGS,
        *WORKLOAD,
        *LENGTHS,
        "--candidate-flags",
        different,
        "--html",
        tmp_path / "report.html",
        "--json",
    ]
    variables = {"VLLM_NEURON_CPU_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr[-3000:]
    document = json.loads(done.stdout)
    baseline, candidate = document["sides"]
    assert (baseline["route"], candidate["route"]) == ("vllm_neuron", "neuron_native")
    first = document["divergences"][0]
    assert first["tokens"][0] == baseline["answers"][first["prompt"]][first["position"]]
    assert first["tokens"][1] == candidate["answers"][first["prompt"]][first["position"]]
    # Each side scores its own token: with logits, since log probabilities would be below zero.
    assert first["baseline"][0] > 0 and first["candidate"][1] > 0
    for side in document["sides"]:
        figures = side["figures"]
        assert figures["compiles_after_warmup"]["median"] == 0 and figures["peak_memory_gib"]["median"] > 0.1
        assert figures["output_tokens_per_second"]["median"] > 0
        # 3 prompts of 48, 24 and 48 tokens in a bucket of 64.
        assert side["buckets"]["prefill_t64_ctx128"] == {"steps": 3, "live": 120, "rows": 192, "waste": 0.375}
        # Each answer's first token is its prefill's.
        assert sum(b["live"] for name, b in side["buckets"].items() if name.startswith("decode")) == 15
    assert "first difference in prompt" in document["failures"][0]
    assert "round 1 of 1, neuron_native: warm start" in done.stderr
    assert (tmp_path / "report.html").read_text().count("<svg") == 7
