"""A start of twelve graphs each of which takes two seconds to compile, as starts on devices take far longer.

    python benchmarks/slow_compiles.py MODEL_DIR

Prints what the log says while the server warms up, and how far vllm_neuron:startup_time_seconds is from the time that
passed until /health answered. Exits with 1 if that is more than a tenth, if /health answered before the last graph was
ready, if a graph has no line, or if the first request compiled something. On the native route in CPU mode, with the
torch twins, whose own compilation takes no time.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx

from vllm_neuron.comparison.server import serving

SECONDS = 2.0
BUCKETS = {
    "num_batched_tokens_buckets": [128, 256, 512],
    "num_seqs_buckets": [1, 2],
    "decode_context_length_buckets": [128, 256, 384],
}
GRAPHS = 3 + 2 * 4 + 1
"""Token buckets, batch buckets of each context and of the longest, prompt logits."""
LINE = re.compile(r"Graph (\d+) of (\d+): \S+ ready in [\d.]+ s \((?:compiled|\w+ cache hit)\)")
MODULE, METRIC = "vllm_neuron.routes.native", "vllm_neuron:startup_time_seconds"
SLOW = f"""
import importlib.util, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name != "{MODULE}":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            compile = module.NativeLowered.compile
            module.NativeLowered.compile = lambda lowered: time.sleep({SECONDS}) or compile(lowered)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Slow())
"""
"""sitecustomize.py of the server's processes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    model = parser.parse_args().model
    flags = ["--max-model-len", "512", "--max-num-seqs", "2", "--max-num-batched-tokens", "512"]
    flags += ["--additional-config", json.dumps({"neuron_config": BUCKETS})]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(SLOW)
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH")))),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_NEURON_CPU_MODE": "1",
            "VLLM_NEURON_DISABLE_NKI_KERNELS": "1",
        }
        log = folder / "log"
        begin = time.monotonic()
        with serving(model, flags, environment, log) as server:
            while not healthy(server.url):
                time.sleep(0.1)
            passed, ready = time.monotonic() - begin, LINE.findall(log.read_text())
            server.wait_for_answer()
            statistics = server.graph_statistics()
            metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        told = float(re.findall(rf"^{METRIC}{{.*}} (\S+)$", metrics, re.MULTILINE)[0])
    for number, total in ready:
        print(f"graph {number} of {total}")
    print(f"{METRIC} is {told:.1f} s, and {passed:.1f} s passed: {told / passed:.1%}")
    late, compiled = statistics["compiles_after_warmup"], statistics["compiled"]
    print(f"{compiled} graphs compiled before the first request, {late} after it")
    lines = [(str(number), str(GRAPHS)) for number in range(1, GRAPHS + 1)]
    return int(ready != lines or compiled != GRAPHS or late > 0 or abs(told / passed - 1) > 0.1)


def healthy(url: str) -> bool:
    """Whether /health answers 200."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


if __name__ == "__main__":
    sys.exit(main())
