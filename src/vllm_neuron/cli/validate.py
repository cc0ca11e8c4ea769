"""`vllm-neuron validate`: a model on its graphs against transformers, or one running server against another."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from vllm_neuron.accuracy import lm_eval
from vllm_neuron.accuracy.agreement import LogitErrors, ScoreAgreement, score_agreement
from vllm_neuron.accuracy.lm_eval import LmEvalError, TaskScore
from vllm_neuron.accuracy.prompts import PROMPTS
from vllm_neuron.accuracy.reference import TRUTH, ReferenceModelError
from vllm_neuron.accuracy.servers import OpenAIServer, ServerError, continue_greedily, scores_of_both
from vllm_neuron.accuracy.validation import Place, Validation, dtype_name, judge, reference_runs
from vllm_neuron.cli.documents import to_json
from vllm_neuron.cli.errors import CommandError
from vllm_neuron.cli.tables import new_table
from vllm_neuron.comparison.server import MODEL_NAME, ServerFailedError, serving
from vllm_neuron.engine.forced import ForcedRun
from vllm_neuron.models.model import LayerOutputs
from vllm_neuron.plugin.compile import CompileFaultsError
from vllm_neuron.plugin.offline import Lengths, open_offline
from vllm_neuron.weights.loading import CheckpointError

HF = "hf"
Report = Callable[[str], None]


@dataclass(frozen=True)
class Choices:
    """What the user asks for besides the two sides.

    Attributes:
        tokens: length of the forced continuations.
        factor: how much more than transformers' own rounding an error may be.
        top_k: k of the top-k agreement.
        layers: whether to look at the residual stream.
        prompts: texts to continue.
        tasks: of lm-eval.
        limit: examples per task; None for all.
        least_agreement: between servers, the share of positions whose most likely token must be the same.
        most_kl: between servers, the largest mean divergence in nats.
        api_key: of the servers.
    """

    tokens: int
    factor: float
    top_k: int
    layers: bool
    prompts: Sequence[str]
    tasks: Sequence[str]
    limit: int | None
    least_agreement: float
    most_kl: float
    api_key: str = "none"


@dataclass(frozen=True)
class ServerValidation:
    """Two running servers compared: how they were asked, and each prompt's agreement."""

    method: str
    prompts: tuple[ScoreAgreement, ...]
    passed: bool


@dataclass(frozen=True)
class Outcome:
    """Everything that was compared; `reference` names what with."""

    reference: str
    model: Validation | None = None
    servers: ServerValidation | None = None
    tasks: tuple[TaskScore, ...] = field(default=())

    @property
    def passed(self) -> bool:
        parts = [part.passed for part in (self.model, self.servers) if part is not None]
        return all(parts) and all(task.agrees for task in self.tasks)


def prompts_of(path: Path | None) -> list[str]:
    """Prompts from a file, one a line; the built-in ones without it.

    Raises:
        CommandError: the file has none.
    """
    if path is None:
        return list(PROMPTS)
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise CommandError(f"--prompts={path}: the file has no prompt. Write one a line.")
    return lines


def run(target: str, flags: Sequence[str], against: str, choices: Choices, report: Report) -> Outcome:
    """Validate a model, or a running server.

    Args:
        target: model, or URL of a server.
        flags: of `vllm serve`, for a model.
        against: "hf" (transformers on the same folder), another folder for transformers, or the URL of a server.
        choices: what else is asked for.
        report: is told what is being done.

    Raises:
        CommandError: it cannot be done.
    """
    if choices.tasks:
        try:
            lm_eval.require_lm_eval()
        except LmEvalError as error:
            raise CommandError(str(error)) from error
    if _is_url(target) != _is_url(against):
        raise CommandError(
            f"{target} against {against}: a running server can be compared with another one only, and a model with "
            "transformers. Name two URLs, or a model and hf or a folder."
        )
    try:
        if _is_url(target):
            if flags:
                raise CommandError(f"{' '.join(flags)}: a running server takes no flags. Leave them out.")
            return _validate_servers(target, against, choices, report)
        return _validate_model(target, flags, against, choices, report)
    except CompileFaultsError as error:
        raise CommandError(*error.faults) from error
    except (ReferenceModelError, CheckpointError, ServerError, ServerFailedError, LmEvalError, ValueError) as error:
        raise CommandError(str(error)) from error


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _validate_model(target: str, flags: Sequence[str], against: str, choices: Choices, report: Report) -> Outcome:
    from transformers import AutoTokenizer

    report("reading the configuration")
    offline = open_offline([target, *flags])
    reference = offline.folder if against == HF else against
    if offline.dtype not in TRUTH:
        raise CommandError(
            f"--dtype {dtype_name(offline.dtype)}: only {', '.join(map(dtype_name, TRUTH))} are compared."
        )
    if choices.layers and offline.model.residual_stream is None:
        raise CommandError(f"{offline.model.architecture} has no residual_stream to look at. Add --no-layers.")
    tokenizer = AutoTokenizer.from_pretrained(offline.tokenizer)
    prompts = [tokenizer(text).input_ids for text in choices.prompts]
    offline.check(max(map(len, prompts)) + choices.tokens)
    runs = reference_runs(reference, offline.dtype, prompts, choices.tokens, report)
    together = offline.config.max_num_seqs
    batches = [runs[start : start + together] for start in range(0, len(runs), together)]
    lengths = [[Lengths(run.forced.prompt_tokens, len(run.forced.token_ids)) for run in batch] for batch in batches]
    layers: list[LayerOutputs] = []
    logits: list[torch.Tensor] = []
    report(f"graphs of the {offline.config.backend} route")
    with offline.running(lengths, choices.layers) as executor:
        for number, batch in enumerate(batches, start=1):
            report(f"forced continuation, batch {number} of {len(batches)}")
            forced = ForcedRun(executor, offline.model, offline.config, [run.forced.token_ids for run in batch])
            layers += forced.layers() if choices.layers else []
            logits += forced.logits([run.forced.prompt_tokens for run in batch])
    found = judge(runs, logits, layers if choices.layers else None, offline.dtype, choices.factor, choices.top_k)
    del runs, batches, layers, logits
    scores = _tasks_of_model(target, flags, reference, found.dtype, offline.tokenizer, choices, report)
    return Outcome(reference, model=found, tasks=tuple(scores))


def _tasks_of_model(
    target: str, flags: Sequence[str], reference: str, dtype: str, tokenizer: str, choices: Choices, report: Report
) -> list[TaskScore]:
    if not choices.tasks:
        return []
    with tempfile.TemporaryDirectory() as folder, serving(target, flags, {}, Path(folder) / "serve.log") as server:
        report("vllm serve")
        server.wait_for_answer()
        report("lm-eval on vllm serve")
        ours = lm_eval.run_tasks(
            lm_eval.server_arguments(server.url, MODEL_NAME, tokenizer), choices.tasks, choices.limit
        )
    report("lm-eval on transformers")
    theirs = lm_eval.run_tasks(lm_eval.transformers_arguments(reference, dtype), choices.tasks, choices.limit)
    return lm_eval.task_scores(ours, theirs)


def _validate_servers(target: str, against: str, choices: Choices, report: Report) -> Outcome:
    ours, reference = OpenAIServer(target, choices.api_key), OpenAIServer(against, choices.api_key)
    found, method = [], ""
    for number, prompt in enumerate(choices.prompts, start=1):
        report(f"prompt {number} of {len(choices.prompts)}")
        forced = continue_greedily(reference, prompt, choices.tokens)
        method, first, second = scores_of_both(reference, ours, forced, choices.top_k)
        found.append(score_agreement(first, second))
    passed = all(one.top1 >= choices.least_agreement and one.kl_mean <= choices.most_kl for one in found)
    scores: list[TaskScore] = []
    if choices.tasks:
        sides = []
        for server in (ours, reference):
            report(f"lm-eval on {server.url}")
            url = server.url.rstrip("/").removesuffix("/v1")
            sides.append(lm_eval.server_arguments(url, server.model, server.tokenizer))
        scores = lm_eval.task_scores(*(lm_eval.run_tasks(side, choices.tasks, choices.limit) for side in sides))
    ours.close()
    reference.close()
    return Outcome(against, servers=ServerValidation(method, tuple(found), passed), tasks=tuple(scores))


def as_json(outcome: Outcome) -> str:
    """The outcome as one JSON object."""
    document: dict[str, Any] = asdict(outcome) | {"passed": outcome.passed}
    if document["model"] is not None:
        document["model"]["passed"] = outcome.model is not None and outcome.model.passed
    document["tasks"] = [asdict(task) | {"agrees": task.agrees} for task in outcome.tasks]
    return to_json(document)


def show(outcome: Outcome, console: Console) -> None:
    """Print the outcome for people; the last line says whether it passed."""
    if outcome.model is not None:
        _show_model(outcome.model, outcome.reference, console)
    if outcome.servers is not None:
        _show_servers(outcome.servers, outcome.reference, console)
    if outcome.tasks:
        table = new_table("task", "metric", "ours", "reference", "standard error", "agrees")
        for task in outcome.tasks:
            numbers = (f"{value:.4f}" for value in (task.ours, task.reference, task.deviation))
            table.add_row(task.task, task.metric, *numbers, "yes" if task.agrees else "no")
        console.print(table)
    console.print("passed" if outcome.passed else "failed")


def _show_model(found: Validation, reference: str, console: Console) -> None:
    if found.stages:
        table = new_table("stage", "ours, median", "transformers, median", "ours, largest", "transformers, largest")
        for stage in found.stages:
            numbers = (stage.ours_median, stage.noise_median, stage.ours_max, stage.noise_max)
            table.add_row(stage.stage, *(f"{value:.2e}" for value in numbers))
        console.print(f"Relative RMS errors against transformers in {found.truth_dtype} on {escape(reference)}:")
        console.print(table)
    table = new_table("logits", "ours", f"transformers in {found.dtype}")
    for name, label in _LOGIT_ROWS.items():
        table.add_row(label, *(f"{getattr(side, name):.4g}" for side in (found.errors, found.noise)))
    console.print(table)
    console.print(f"{found.positions} positions, factor {found.factor:g}")
    for what, place in (("residual stream", found.layer), ("logits of the serving graphs", found.logits)):
        console.print(f"{what}: {describe(place)}")


_LOGIT_ROWS = {
    "rms": "RMS error",
    "p99": "99th percentile of the error",
    "max": "largest error",
    "top1": "most likely token equal",
    "topk": "top-k tokens in common",
    "kl_mean": "KL divergence, mean (nats)",
    "kl_max": "KL divergence, largest",
}
assert _LOGIT_ROWS.keys() == LogitErrors.__annotations__.keys()


def describe(place: Place | None) -> str:
    """Where the first excess is, in a sentence."""
    if place is None:
        return "within what rounding explains"
    excess = place.excess
    return (
        f"more than rounding explains, first at {excess.stage}, prompt {place.prompt}, position {place.position}: "
        f"error {excess.error:.2e}, allowed {excess.allowed:.2e} (transformers "
        f"{excess.noise:.2e}); {excess.rows} rows there"
    )


def _show_servers(found: ServerValidation, reference: str, console: Console) -> None:
    table = new_table(
        "prompt", "positions", "top-1", "top-k", "largest difference", "KL mean", "KL largest", "first at"
    )
    for index, one in enumerate(found.prompts):
        first = "-" if one.first_difference is None else str(one.first_difference)
        shares = (f"{one.top1:.1%}", f"{one.topk:.1%}", f"{one.max_difference:.3g}")
        table.add_row(str(index), str(one.positions), *shares, f"{one.kl_mean:.2e}", f"{one.kl_max:.2e}", first)
    console.print(f"Against {escape(reference)}, asked by {found.method}:")
    console.print(table)
