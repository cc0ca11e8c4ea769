"""Cold and warm start of both compile routes in CPU mode on one model, and of vLLM's own CPU backend if it is there.

    python benchmarks/start_time.py MODEL_DIR [--peer PYTHON] [--rounds N]

Cold: every cache is empty, that of our C++ kernels and that of torch.compile included. Warm: the same again. Seconds
from the start of the interpreter to a model that answers, with the default buckets of max_model_len 1024 and
max_num_seqs 8; N rounds in turn, medians at the end. PYTHON is the interpreter of an environment with vLLM's CPU
backend.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUTES = ("neuron_native", "vllm_neuron")
PEER = "vLLM's CPU backend"

START = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=1024, seed=0)
    llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    counters = {}
    if sys.argv[2] == "ours":
        (counters,) = llm.collective_rpc("graph_statistics")
    print(json.dumps({"ready": True, "compiled": counters.get("compiled")}), flush=True)
    llm.llm_engine.engine_core.shutdown()
"""


def start(system: str, python: str, model: str, caches: Path) -> tuple[float, int | None]:
    """Seconds until the model has answered, and how many graphs were compiled for it."""
    settings = {"VLLM_CACHE_ROOT": str(caches / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    if system == PEER:
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    else:
        settings |= {
            "VLLM_NEURON_CPU_MODE": "1",
            "VLLM_NEURON_BACKEND": system,
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }
    script = caches / "start.py"
    script.write_text(START)
    begin = time.monotonic()
    process = subprocess.Popen(
        [python, str(script), model, "peer" if system == PEER else "ours"],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"ready": true'):
            seconds = time.monotonic() - begin
            process.wait()
            return seconds, json.loads(line)["compiled"]
    raise SystemExit(f"{system} did not start: exit code {process.wait()}")


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
