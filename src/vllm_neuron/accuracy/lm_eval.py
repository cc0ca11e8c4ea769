"""Task scores by lm-eval (EleutherAI's lm-evaluation-harness), where it is installed, against running servers.

lm-eval was not installed where this was written: its command line and its results are as its documentation describes
them, and the tests put a stand-in in its place.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVIATIONS = 2.0
"""Two scores differ if they are further apart than this many standard errors of their difference."""


class LmEvalError(RuntimeError):
    """lm-eval is not installed, or has failed."""


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task on both sides.

    Attributes:
        task, metric: lm-eval's names, e.g. "arc_easy" and "acc,none".
        ours, reference: the scores.
        deviation: standard error of their difference; 0 where lm-eval gives none.
    """

    task: str
    metric: str
    ours: float
    reference: float
    deviation: float

    @property
    def agrees(self) -> bool:
        return abs(self.ours - self.reference) <= DEVIATIONS * self.deviation


def require_lm_eval() -> None:
    """Check that lm-eval is installed.

    Raises:
        LmEvalError: it is not.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise LmEvalError("--tasks: package lm-eval is not installed. Run: pip install 'lm-eval[api]'")


def server_arguments(url: str, model: str, tokenizer: str) -> tuple[str, str]:
    """lm-eval's --model and --model_args for a running server.

    Args:
        url: of the server, without /v1.
        model: name that it serves.
        tokenizer: folder or name of its tokenizer.
    """
    arguments = f"model={model},base_url={url}/v1/completions,tokenizer={tokenizer},tokenized_requests=True"
    return "local-completions", arguments


def transformers_arguments(folder: str, dtype: str) -> tuple[str, str]:
    """lm-eval's --model and --model_args for transformers on a folder in a dtype such as "bfloat16"."""
    return "hf", f"pretrained={folder},dtype={dtype},device=cpu"


def run_tasks(side: tuple[str, str], tasks: Sequence[str], limit: int | None) -> dict[str, Any]:
    """lm-eval's results of `tasks`: its "results" by task.

    Args:
        side: lm-eval's --model and --model_args.
        tasks: lm-eval's names.
        limit: examples per task; None for all.

    Raises:
        LmEvalError: it is not installed, or has failed.
    """
    require_lm_eval()
    kind, arguments = side
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", arguments]
        command += ["--tasks", ",".join(tasks), "--output_path", folder]
        command += [] if limit is None else ["--limit", str(limit)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise LmEvalError(f"lm-eval ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found = sorted(Path(folder).rglob("results*.json"))
        if not found:
            raise LmEvalError(f"lm-eval has left no results*.json:\n{done.stdout[-2000:]}")
        results: dict[str, Any] = json.loads(found[-1].read_text())["results"]
        return results


def task_scores(ours: dict[str, Any], reference: dict[str, Any]) -> list[TaskScore]:
    """Every metric that both sides have: "acc,none" beside its standard error "acc_stderr,none"."""
    scores = []
    for task in sorted(ours.keys() & reference.keys()):
        for metric in sorted(ours[task].keys() & reference[task].keys()):
            values = ours[task][metric], reference[task][metric]
            if "_stderr" in metric or not all(isinstance(value, int | float) for value in values):
                continue
            name, _, rest = metric.partition(",")
            errors = (_number(side[task].get(f"{name}_stderr,{rest}")) for side in (ours, reference))
            deviation = sum(error**2 for error in errors) ** 0.5
            scores.append(TaskScore(task, metric, float(values[0]), float(values[1]), deviation))
    return scores


def _number(value: Any) -> float:
    """lm-eval writes "N/A" for a standard error that it does not estimate."""
    return float(value) if isinstance(value, int | float) else 0.0
