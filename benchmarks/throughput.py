"""Offline throughput of both compile routes in CPU mode on one model, and of vLLM's own CPU backend if it is there.

    python benchmarks/throughput.py MODEL_DIR [--peer PYTHON] [--rounds N]

PYTHON is the interpreter of an environment with vLLM's CPU backend. The systems take turns, each in a process of its
own, N times; the last line has each figure's median.

Decode: prompts of 128 tokens, 128 new tokens each, greedy, end of sequence ignored, at batch 1 and 8. Prefill: 8
prompts of 900 tokens, one new token each. Each figure is the median of three runs after one that warms up.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

ROUTES = ("neuron_native", "vllm_neuron")
PEER = "vLLM's CPU backend"


def measure(model: str) -> dict[str, float]:
    """Tokens per second of the platform that the environment selects, seconds to start, and memory of its engine."""
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


def run(system: str, python: str, model: str) -> dict[str, float]:
    """`measure` in a new process."""
    if system == PEER:
        settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    else:
        settings = {"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_BACKEND": system}
    command = [python, __file__, model, "--measure"]
    done = subprocess.run(command, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    print(system, json.dumps(figures), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.model)))
        return
    systems = dict.fromkeys(ROUTES, sys.executable) | ({PEER: arguments.peer} if arguments.peer else {})
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for _ in range(arguments.rounds):
        for system, python in systems.items():
            runs[system].append(run(system, python, arguments.model))
    medians = {
        system: {figure: statistics.median(one[figure] for one in figures) for figure in figures[0]}
        for system, figures in runs.items()
    }
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
