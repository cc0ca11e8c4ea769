"""An engine inside the user's own process, without vLLM's engine process."""

import json
import os
import subprocess
import sys

from tests.checkpoints import checkpoint, greedy_oracle, prompt

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

path, prompts = json.loads(sys.argv[1])
llm = LLM(
    path, dtype="float32", max_model_len=512, max_num_seqs=2, max_num_batched_tokens=128, num_gpu_blocks_override=20,
    additional_config={"neuron_config": {"num_seqs_buckets": [2]}},
)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
statistics = llm.collective_rpc("graph_statistics")[0]
assert "layers.0.qkv" in repr(llm), repr(llm)
print("RESULT", json.dumps([[list(o.outputs[0].token_ids) for o in outputs], statistics]))
"""


def test_real_engine_in_the_users_process() -> None:
    """On one route: tests/serving/ runs engines of both like this, in the process of pytest."""
    path = checkpoint("llama")
    prompts = [prompt(length, seed=length) for length in (1, 200, 33)]
    env = {**os.environ, "VLLM_NEURON_BACKEND": "neuron_native", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(path), prompts])]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    tokens, statistics = json.loads(line.removeprefix("RESULT"))
    assert tokens == [greedy_oracle(path, ids, 8) for ids in prompts]
    assert statistics["compiles_after_warmup"] == 0 and statistics["executions"]["decode_b2_ctx512"] > 0
    report = [line for line in (done.stdout + done.stderr).splitlines() if "Effective configuration" in line]
    assert len(report) == 1, "the effective configuration is printed once"
