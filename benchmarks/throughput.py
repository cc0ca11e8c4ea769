"""Offline throughput of both compile routes in CPU mode on one model, and of vLLM's own CPU backend if it is there.

    python benchmarks/throughput.py MODEL_DIR [--peer PYTHON] [--rounds N]

PYTHON is the interpreter of an environment with vLLM's CPU backend. Each system has an engine in a process of its own,
which waits while another one is measured: the systems take turns at each figure, N times, so that what else the machine
does falls on all of them. The last line has each figure's median.

Decode: prompts of 128 tokens, 128 new tokens each, greedy, end of sequence ignored, at batch 1 and 8. Prefill: 8
prompts of 900 tokens, one new token each. A few tokens of each kind are generated before anything is measured.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import IO, Any

ROUTES = ("neuron_native", "vllm_neuron")
PEER = "vLLM's CPU backend"
FIGURES = {"decode_batch_1": (1, 128, 128), "decode_batch_8": (8, 128, 128), "prefill": (8, 900, 1)}
"""Each figure to its requests, prompt tokens and new tokens of each."""


def work(model: str, replies: IO[str]) -> None:
    """An engine of the platform that the environment selects; measures each figure whose name comes on standard input.

    Args:
        model: its folder.
        replies: where a line of JSON is written for each figure; the seconds to start come first, memory last.
    """
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(
        model=model,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        seed=0,
    )
    seconds = time.perf_counter() - begin
    for requests, prompt_tokens, new_tokens in FIGURES.values():
        _generate(llm, requests if new_tokens > 1 else 1, prompt_tokens, 2)
    print(json.dumps(round(seconds, 1)), file=replies, flush=True)
    for line in sys.stdin:
        requests, prompt_tokens, new_tokens = FIGURES[line.strip()]
        seconds = _generate(llm, requests, prompt_tokens, new_tokens)
        counted = requests * (new_tokens if new_tokens > 1 else prompt_tokens)
        print(json.dumps(round(counted / seconds, 1)), file=replies, flush=True)
    llm.llm_engine.engine_core.shutdown()
    print(
        json.dumps(round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2)), file=replies, flush=True
    )


def _generate(llm: Any, requests: int, prompt_tokens: int, new_tokens: int) -> float:
    """Seconds that a batch of requests takes."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    prompts = [
        {"prompt_token_ids": [10 + (31 * row + 17 * i) % 1000 for i in range(prompt_tokens)]} for row in range(requests)
    ]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


class System:
    """An engine in a process of its own.

    Args:
        name: a route, or PEER.
        python: its interpreter.
        model: folder of the model.
    """

    def __init__(self, name: str, python: str, model: str) -> None:
        if name == PEER:
            settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            settings["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        else:
            settings = {"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_BACKEND": name}
        ours, theirs = os.pipe()
        command = [python, __file__, model, "--replies", str(theirs)]
        self._process = subprocess.Popen(
            command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=sys.stderr, pass_fds=[theirs], text=True
        )
        os.close(theirs)
        self._replies = os.fdopen(ours)
        self.name = name
        self.start_seconds = self._reply()

    def measure(self, figure: str) -> float:
        """Tokens per second."""
        assert self._process.stdin is not None
        print(figure, file=self._process.stdin, flush=True)
        rate = self._reply()
        print(f"{self.name}, {figure}: {rate}", flush=True)
        return rate

    def close(self) -> float:
        """End it; the most memory that its engine had, in GiB."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        peak = self._reply()
        self._process.wait()
        return peak

    def _reply(self) -> float:
        line = self._replies.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; its log is above")
        return float(json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replies", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replies is not None:
        work(arguments.model, os.fdopen(arguments.replies, "w"))
        return
    pythons = dict.fromkeys(ROUTES, sys.executable) | ({PEER: arguments.peer} if arguments.peer else {})
    systems = [System(name, python, arguments.model) for name, python in pythons.items()]
    rates: dict[str, dict[str, list[float]]] = {system.name: {figure: [] for figure in FIGURES} for system in systems}
    for _ in range(arguments.rounds):
        for figure in FIGURES:
            for system in systems:
                rates[system.name][figure].append(system.measure(figure))
    medians = {
        system.name: {figure: statistics.median(found) for figure, found in rates[system.name].items()}
        | {"start_seconds": system.start_seconds, "engine_peak_gib": system.close()}
        for system in systems
    }
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
