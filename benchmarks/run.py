"""All benchmarks, and a report that compares them with the last run: what `make bench` does.

    python benchmarks/run.py MODEL_DIR [--only pytest|throughput|serve] [--folder DIR]

- pytest: every benchmarks/test_*.py (steps, batches, host work, bucketing, cache, sampler, kernel estimates);
- throughput: benchmarks/throughput.py on both routes;
- serve: vLLM's own `vllm bench serve` against our server, on both routes: decode at concurrency 1, 8 and 32, prefill,
  and a mix of lengths.

Results lie in DIR (build/bench) as one JSON file a run; report.html and report.md compare the last two.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from in_process import BUCKETS
from rich.console import Console

from vllm_neuron.cli.tables import new_table
from vllm_neuron.comparison.server import MODEL_NAME, serving
from vllm_neuron.reporting import page
from vllm_neuron.reporting.history import Change, Result, changes, last, save

HERE = Path(__file__).parent
ROUTES = ("neuron_native", "vllm_neuron")
SERVER = ("--max-model-len", "1024", "--max-num-seqs", "32", "--max-num-batched-tokens", "1024")
LOADS = {
    "decode at concurrency 1": (1, 4, 128, 64, 0.0),
    "decode at concurrency 8": (8, 16, 128, 64, 0.0),
    "decode at concurrency 32": (32, 64, 128, 64, 0.0),
    "prefill of 900 tokens": (8, 8, 900, 1, 0.0),
    "mixed lengths": (8, 24, 300, 40, 0.8),
}
"""Concurrency, requests, prompt tokens, output tokens, and the share by which lengths vary."""


def run_pytest() -> dict[str, Result]:
    """Medians of all pytest benchmarks, in microseconds; kernel estimates as they are estimated."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmarks.json"
        command = [sys.executable, "-m", "pytest", str(HERE), f"--benchmark-json={path}", "--timeout=3600"]
        subprocess.run(command, check=True)
        found = {}
        for one in json.loads(path.read_text())["benchmarks"]:
            if "estimated_us" in one["extra_info"]:
                found[f"{one['fullname']}, estimated"] = Result(one["extra_info"]["estimated_us"], "us")
            else:
                found[one["fullname"]] = Result(1e6 * one["stats"]["median"], "us")
    return found


def run_throughput(model: str) -> dict[str, Result]:
    """Figures of benchmarks/throughput.py by route."""
    command = [sys.executable, str(HERE / "throughput.py"), model]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = {}
    for route, figures in json.loads(done.stdout.strip().splitlines()[-1]).items():
        for name, value in figures.items():
            less_is_better = name in ("start_seconds", "engine_peak_gib")
            unit = {"start_seconds": "s", "engine_peak_gib": "GiB"}.get(name, "tok/s")
            found[f"throughput, {route}, {name}"] = Result(value, unit, less_is_better)
    return found


def run_serve(model: str) -> dict[str, Result]:
    """Figures of `vllm bench serve` by route and load."""
    found = {}
    for route in ROUTES:
        environment = {"VLLM_NEURON_CPU_MODE": "1", "VLLM_NEURON_BACKEND": route}
        flags = (*SERVER, "--additional-config", json.dumps(BUCKETS), "--no-enable-prefix-caching")
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(model, flags, environment, Path(folder) / "serve.log") as server,
        ):
            server.wait_for_answer()
            for load in LOADS:
                for name, result in bench_serve(server.url, model, load, Path(folder)).items():
                    found[f"vllm bench serve, {route}, {load}, {name}"] = result
    return found


def bench_serve(url: str, model: str, load: str, folder: Path) -> dict[str, Result]:
    """One run of vLLM's own load generator."""
    concurrency, requests, prompt_tokens, output_tokens, spread = LOADS[load]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", url, "--model", MODEL_NAME, "--tokenizer", model, "--dataset-name", "random"]
    command += ["--random-input-len", str(prompt_tokens), "--random-output-len", str(output_tokens)]
    command += ["--random-range-ratio", str(spread), "--num-prompts", str(requests), "--ignore-eos", "--seed", "0"]
    command += ["--max-concurrency", str(concurrency), "--metric-percentiles", "50,95,99", "--disable-tqdm"]
    command += ["--percentile-metrics", "ttft,itl", "--save-result", "--result-dir", str(folder)]
    command += ["--result-filename", "result.json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"VLLM_NEURON_CPU_MODE": "1"})
    figures = json.loads((folder / "result.json").read_text())
    if figures["completed"] != requests:
        raise SystemExit(f"vllm bench serve, {load}: {figures['completed']} of {requests} requests were answered")
    found = {f"p{p} ttft": Result(figures[f"p{p}_ttft_ms"], "ms") for p in (50, 95, 99)}
    if output_tokens > 1:
        found |= {f"p{p} itl": Result(figures[f"p{p}_itl_ms"], "ms") for p in (50, 95, 99)}
    found["output"] = Result(figures["output_throughput"], "tok/s", False)
    found["total"] = Result(figures["total_token_throughput"], "tok/s", False)
    return found


COLUMNS = ("benchmark", "before", "now", "ratio", "")


def row(change: Change) -> list[str]:
    """A line of the report."""
    values = ["-" if side is None else f"{side.value:.4g} {side.unit}" for side in (change.before, change.after)]
    return [change.name, *values, "-" if change.ratio is None else f"{change.ratio:.2f}", change.verdict]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--only", choices=("pytest", "throughput", "serve"))
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "bench")
    arguments = parser.parse_args()
    parts = {
        "pytest": run_pytest,
        "throughput": lambda: run_throughput(arguments.model),
        "serve": lambda: run_serve(arguments.model),
    }
    results: dict[str, Result] = {}
    for name, part in parts.items():
        if arguments.only in (None, name):
            results |= part()
    before = last(arguments.folder)
    save(arguments.folder, results, datetime.now())
    earlier = before[1] if before else {}
    found = [one for one in changes(earlier, results) if arguments.only is None or one.after is not None]
    rows = [row(one) for one in found]
    title = f"Benchmarks, compared with {before[0]}" if before else "Benchmarks, a first run"
    (arguments.folder / "report.html").write_text(page.page(title, page.table(COLUMNS, rows)))
    lines = [f"# {title}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    (arguments.folder / "report.md").write_text("\n".join(lines) + "\n")
    table = new_table(*COLUMNS, numbers=("before", "now", "ratio"))
    for cells in rows:
        table.add_row(*cells)
    console = Console(width=200, highlight=False)
    console.print(title)
    console.print(table)
    console.print(f"{arguments.folder / 'report.html'}")


if __name__ == "__main__":
    main()
