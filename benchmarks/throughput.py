"""Offline throughput of both compile routes in CPU mode on one model.

    python benchmarks/throughput.py MODEL_DIR [BACKEND ...]

Decode: prompts of 128 tokens, 128 new tokens each, greedy, end of sequence ignored, at batch 1 and 8. Prefill: 8
prompts of 900 tokens, one new token each. Each figure is the median of three runs after one that warms up.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

BACKENDS = ("neuron_native", "vllm_neuron")


def measure(model: str) -> dict[str, float]:
    """Figures of the backend that the environment selects, in tokens per second."""
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(
        model=model,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        seed=0,
    )
    start_seconds = time.perf_counter() - begin

    def rate(batch: int, prompt_tokens: int, new_tokens: int, counted: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return round(statistics.median([_rate(llm, batch, prompt_tokens, params, counted) for _ in range(4)][1:]), 1)

    figures = {
        "decode_batch_1": rate(1, 128, 128, 128),
        "decode_batch_8": rate(8, 128, 128, 8 * 128),
        "prefill": rate(8, 900, 1, 8 * 900),
        "start_seconds": round(start_seconds, 1),
    }
    llm.llm_engine.engine_core.shutdown()
    figures["engine_peak_gib"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2)
    return figures


def _rate(llm: Any, batch: int, prompt_tokens: int, params: Any, counted: int) -> float:
    """Counted tokens per second of one batch."""
    prompts = [
        {"prompt_token_ids": [10 + (31 * row + 17 * i) % 1000 for i in range(prompt_tokens)]} for row in range(batch)
    ]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return counted / (time.perf_counter() - begin)


def main() -> None:
    model, *backends = sys.argv[1:]
    if backends == ["--one"]:
        print(json.dumps(measure(model)))
        return
    for backend in backends or BACKENDS:
        env = os.environ | {"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_BACKEND": backend}
        command = [sys.executable, __file__, model, "--one"]
        output = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(backend, output.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
