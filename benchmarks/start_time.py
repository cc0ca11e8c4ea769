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
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [Path(python).parent / "vllm", "serve", model, "--served-model-name", "model", "--port", str(port)]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "1024"]
    log = caches / "log"
    begin = time.monotonic()
    with log.open("w") as output:
        server = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT)
    try:
        while not answers(port):
            if server.poll() is not None:
                raise SystemExit(f"{system} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        seconds = time.monotonic() - begin
    finally:
        server.terminate()
        server.wait()
    compiled = COMPILED.search(log.read_text())
    return seconds, int(compiled[1]) if compiled else None


def answers(port: int) -> bool:
    """Whether a first request for one token succeeds."""
    body = json.dumps({"model": "model", "prompt": "The capital of France is", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


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
