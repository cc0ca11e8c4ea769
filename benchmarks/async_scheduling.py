"""What async scheduling buys: time of a decode step with and without it, and how much of the host's work stays visible.

    VLLM_NEURON_CPU_MODE=1 python benchmarks/async_scheduling.py MODEL_DIR [--steps N]

First on the model itself, in batches of 1 and 8. Then with a stand-in for the executable that sleeps 2, 5 and 20 ms, as
the host would wait for a device: what a step takes beyond that is the host's visible work. Milliseconds, medians over
single steps of vLLM's engine core, which is driven in this process; the API server has no part in it.
"""

import argparse
import statistics
import time
from typing import Any

from in_process import core_of, engine, time_batch

BATCHES = (1, 8)
SLEEPS = (0.002, 0.005, 0.020)
PROMPT = list(range(100, 116))


class SleepingExecutable:
    """Stands in for a compiled graph: sleeps, and returns what the graph has returned once."""

    def __init__(self, executable: Any) -> None:
        self.executable = executable
        self.outputs: Any = None
        self.seconds = 0.0
        self.slept: list[float] = []

    def __call__(self, weights: Any, kv_cache: Any, inputs: Any) -> tuple[Any, Any]:
        if self.outputs is None:
            outputs, kv_cache = self.executable(weights, kv_cache, inputs)
            self.outputs = type(outputs)(*(tensor.clone() for tensor in outputs))
            return self.outputs, kv_cache
        begin = time.perf_counter()
        time.sleep(self.seconds)
        self.slept.append(time.perf_counter() - begin)
        return self.outputs, kv_cache


def decode(llm: Any, batch: int, steps: int) -> float:
    """Median seconds of a decode step with `batch` requests."""
    return statistics.median(time_batch(llm, [PROMPT] * batch, steps, temperature=0.8, top_p=0.9).steps)


def measure(model: str, asynchronous: bool, steps: int) -> dict[str, float]:
    """Milliseconds by what was measured."""
    arguments = {
        "max_model_len": 1024,
        "max_num_seqs": max(BATCHES),
        "max_num_batched_tokens": 256,
        "async_scheduling": asynchronous,
        "additional_config": {
            "neuron_config": {"on_device_sampling_config": {}, "num_seqs_buckets": list(BATCHES)},
        },
    }
    with engine(model, **arguments) as llm:
        found = {f"model, batch {batch}": 1e3 * decode(llm, batch, steps) for batch in BATCHES}
        executables = core_of(llm).model_executor.driver_worker.worker.executor._executables
        stand_ins = {graph: SleepingExecutable(executable) for graph, executable in executables.items()}
        executables.update(stand_ins)
        for seconds in SLEEPS:
            for stand_in in stand_ins.values():
                stand_in.seconds, stand_in.slept = seconds, []
            step = decode(llm, max(BATCHES), steps)
            slept = [s for graph, one in stand_ins.items() if graph.kind == "decode" for s in one.slept]
            found[f"device {1e3 * seconds:.0f} ms, visible host work"] = 1e3 * (step - statistics.median(slept))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    ahead, in_step = (measure(arguments.model, mode, arguments.steps) for mode in (True, False))
    print(f"{'ms a step':40}{'async':>10}{'sync':>10}")
    for what in ahead:
        print(f"{what:40}{ahead[what]:10.2f}{in_step[what]:10.2f}")


if __name__ == "__main__":
    main()
