"""Cold and warm start of both compile routes in CPU mode on one model, and of vLLM's own CPU backend if it is there.

    python benchmarks/start_time.py MODEL_DIR [--peer PYTHON] [--rounds N]

Cold: every cache is empty, that of our C++ kernels and that of torch.compile included. Warm: the same again. Seconds
from `vllm serve` to the first answer, with the default buckets of max_model_len 1024 and max_num_seqs 8; N rounds in
turn, medians at the end. PYTHON is the interpreter of an environment with vLLM's CPU
backend.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

from vllm_neuron.comparison.server import serving

ROUTES = ("neuron_native", "vllm_neuron")
PEER = "vLLM's CPU backend"

COMPILED = re.compile(r"Warm-up: \d+ graphs ready .*, (\d+) compiled\)")


def start(system: str, python: str, model: str, caches: Path) -> tuple[float, int | None]:
    """Seconds until the server has answered a request, and how many graphs were compiled for it."""
    settings = {"VLLM_CACHE_ROOT": str(caches / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    if system == PEER:
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    else:
        settings |= {"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_BACKEND": system}
    flags = ("--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "1024")
    log = caches / "log"
    with serving(model, flags, settings, log, python) as server:
        seconds = server.wait_for_answer()
    compiled = COMPILED.search(log.read_text())
    return seconds, int(compiled[1]) if compiled else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    systems = dict.fromkeys(ROUTES, sys.executable) | ({PEER: arguments.peer} if arguments.peer else {})
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for system, python in systems.items():
            with tempfile.TemporaryDirectory() as caches:
                for kind in ("cold", "warm"):
                    took, compiled = start(system, python, arguments.model, Path(caches))
                    seconds.setdefault(f"{system}, {kind}", []).append(took)
                    print(f"{system}, {kind}: {took:.1f} s, {compiled} graphs compiled", flush=True)
    print(json.dumps({name: round(statistics.median(took), 1) for name, took in seconds.items()}))


if __name__ == "__main__":
    main()
