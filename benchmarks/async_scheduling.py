"""What async scheduling buys: time of a decode step with and without it, and how much of the host's work stays visible.

    VLLM_NEURON_CPU_MODE=1 python benchmarks/async_scheduling.py MODEL_DIR [--steps N]

First on the model itself, in batches of 1 and 8. Then with a stand-in for a device in place of the executables: C code
that sleeps 2, 5 or 20 ms without Python's lock and notes when it began and when it was done. The host's work that stays
visible is what such a device would see: the gap from the end of one execution to the beginning of the next.
Milliseconds over single steps of vLLM's engine core, which is driven in this process; the API server has no part in it.
The device's thread, the one that waits for tokens and the scheduler's hand over to each other at every step: on a
machine whose cores are busy with something else, what is measured is how long they wait for a core.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from in_process import WARM_STEPS, core_of, engine, time_batch

BATCHES = (1, 8)
DEVICE_SECONDS = (0.002, 0.005, 0.020)
PROMPT = list(range(100, 116))

DEVICE = """
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

void execute(double seconds, double *begin, double *end) {
    struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
    *begin = now();
    nanosleep(&t, 0);
    *end = now();
}
"""


class Device:
    """Stands in for a device, which executes one graph at a time, each for the same time.

    Attributes:
        seconds: of an execution.
        executions: when each began and ended, in seconds.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "device.c", Path(folder) / "device.so"
            source.write_text(DEVICE)
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
            # Not PyDLL: Python's lock is free meanwhile.
            self._execute = ctypes.CDLL(str(library)).execute
        self.seconds = 0.0
        self.executions: list[tuple[float, float]] = []

    def execute(self) -> None:
        begin, end = ctypes.c_double(), ctypes.c_double()
        self._execute(ctypes.c_double(self.seconds), ctypes.byref(begin), ctypes.byref(end))
        self.executions.append((begin.value, end.value))

    def gaps(self) -> list[float]:
        """Seconds between the executions, while nothing ran."""
        return [begin - end for (_, end), (begin, _) in pairwise(self.executions)]


class OnDevice:
    """Stands in for a compiled graph: keeps the device busy, and returns what the graph has returned once."""

    def __init__(self, executable: Any, device: Device) -> None:
        self._executable = executable
        self._device = device
        self._outputs: Any = None

    def __call__(self, weights: Any, kv_cache: Any, inputs: Any) -> tuple[Any, Any]:
        if self._outputs is None:
            outputs, kv_cache = self._executable(weights, kv_cache, inputs)
            self._outputs = type(outputs)(*(tensor.clone() for tensor in outputs))
        else:
            self._device.execute()
        return self._outputs, kv_cache


class Found(NamedTuple):
    """Milliseconds: of the middle step, and of the one that only a tenth of the steps exceeds."""

    median: float
    late: float


def found(seconds: Sequence[float]) -> Found:
    return Found(1e3 * statistics.median(seconds), 1e3 * statistics.quantiles(seconds, n=10)[-1])


def decode(llm: Any, batch: int, steps: int) -> tuple[float, ...]:
    """Seconds of each decode step with `batch` requests."""
    return time_batch(llm, [PROMPT] * batch, steps, temperature=0.8, top_p=0.9).steps


def measure(model: str, asynchronous: bool, steps: int) -> dict[str, Found]:
    """By what was measured."""
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
        results = {f"the model, batch {batch}: step": found(decode(llm, batch, steps)) for batch in BATCHES}
        executables = core_of(llm).model_executor.driver_worker.worker.executor._executables
        device = Device()
        executables.update({graph: OnDevice(executable, device) for graph, executable in executables.items()})
        for batch in BATCHES:
            decode(llm, batch, WARM_STEPS)
            for device.seconds in DEVICE_SECONDS:
                device.executions = []
                decode(llm, batch, steps)
                # The prompts, before, and the steps that end the requests, after, are not what is asked about.
                what = f"device {1e3 * device.seconds:.0f} ms, batch {batch}: gap"
                results[what] = found(device.gaps()[batch + WARM_STEPS :][:steps])
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    ahead, in_step = (measure(arguments.model, mode, arguments.steps) for mode in (True, False))
    print(f"{'ms, median and 90th percentile':40}{'async':>18}{'sync':>18}")
    for what in ahead:
        print(f"{what:40}" + "".join(f"{one[what].median:9.2f}{one[what].late:9.2f}" for one in (ahead, in_step)))


if __name__ == "__main__":
    main()
