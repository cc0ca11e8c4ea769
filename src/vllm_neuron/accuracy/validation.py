"""A forced continuation through our graphs and through transformers, and what comes of comparing the two.

Every side computes the same tokens, so one near tie does not make all that follows incomparable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_neuron.accuracy.agreement import LogitErrors, logit_errors
from vllm_neuron.accuracy.reference import TRUTH, greedy, layer_outputs, load_reference
from vllm_neuron.accuracy.three_way import Excess, first_excess, row_errors
from vllm_neuron.models.model import LayerOutputs


@dataclass(frozen=True)
class Forced:
    """A prompt and what follows it, whoever computes it.

    Attributes:
        token_ids: [T] of both together.
        prompt_tokens: how many of them are the prompt.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class ReferenceRun:
    """One continuation as transformers computes it, true and rounded."""

    forced: Forced
    truth: LayerOutputs
    noise: LayerOutputs


@dataclass(frozen=True)
class Place:
    """An `Excess`, with the prompt and the position that its row stands for."""

    excess: Excess
    prompt: int
    position: int


@dataclass(frozen=True)
class StageErrors:
    """Relative RMS errors of one stage over all rows: the median and the largest, of ours and of transformers."""

    stage: str
    ours_median: float
    ours_max: float
    noise_median: float
    noise_max: float


@dataclass(frozen=True)
class Validation:
    """What came out.

    Attributes:
        dtype: that is served.
        truth_dtype: of the truth.
        factor: how much more than transformers' own rounding an error may be.
        positions: that were compared, over all prompts.
        errors: of our logits against the truth.
        noise: of transformers' logits in the served dtype against the truth.
        stages: of the residual stream, in order; empty where the layers were left out.
        layer: where the residual stream first exceeds what rounding explains, or None.
        logits: where the logits of the served graphs first do, or None.
        error_by_position: relative RMS error of the logits, per position of the first prompt.
        noise_by_position: the same of transformers in the served dtype.
    """

    dtype: str
    truth_dtype: str
    factor: float
    positions: int
    errors: LogitErrors
    noise: LogitErrors
    stages: tuple[StageErrors, ...]
    layer: Place | None
    logits: Place | None
    error_by_position: tuple[float, ...]
    noise_by_position: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return self.layer is None and self.logits is None


def reference_runs(
    folder: str, dtype: torch.dtype, prompts: Sequence[Sequence[int]], tokens: int, report: Callable[[str], None]
) -> list[ReferenceRun]:
    """Each prompt continued greedily by the truth, and that sequence through transformers in both dtypes.

    Raises:
        ReferenceModelError: transformers does not read the folder, or not its layers.
    """
    report(f"transformers in {dtype_name(TRUTH[dtype])}")
    model = load_reference(folder, TRUTH[dtype])
    sequences = [Forced((*prompt, *greedy(model, prompt, tokens)), len(prompt)) for prompt in prompts]
    truths = [layer_outputs(model, forced.token_ids) for forced in sequences]
    del model
    report(f"transformers in {dtype_name(dtype)}")
    model = load_reference(folder, dtype)
    noises = [layer_outputs(model, forced.token_ids) for forced in sequences]
    return [ReferenceRun(*run) for run in zip(sequences, truths, noises, strict=True)]


def judge(
    runs: Sequence[ReferenceRun],
    logits: Sequence[torch.Tensor],
    layers: Sequence[LayerOutputs] | None,
    dtype: torch.dtype,
    factor: float,
    k: int,
) -> Validation:
    """Compare ours with transformers.

    Args:
        runs: of transformers, one per prompt.
        logits: [T, V] per prompt, of the graphs that serve.
        layers: per prompt, of the "layers" graphs; None leaves the residual stream out.
        dtype: that is served.
        factor: how much more than transformers' own rounding an error may be.
        k: of the top-k agreement.
    """
    owners = [(prompt, position) for prompt, run in enumerate(runs) for position in range(len(run.forced.token_ids))]

    def place(excess: Excess | None) -> Place | None:
        return None if excess is None else Place(excess, *owners[excess.row])

    truth, noise = (torch.cat([side.logits for side in sides]) for sides in _sides(runs))
    ours = torch.cat(list(logits))
    logit_rows, noise_rows = row_errors(ours, truth), row_errors(noise, truth)
    first = len(runs[0].forced.token_ids)
    stages: tuple[StageErrors, ...] = ()
    layer = None
    if layers is not None:
        names, stage_rows, noise_stage_rows = _stage_rows(runs, layers)
        layer = place(first_excess(names, stage_rows, noise_stage_rows, factor, dtype))
        stages = tuple(map(_stage_errors, names, stage_rows, noise_stage_rows))
    return Validation(
        dtype=dtype_name(dtype),
        truth_dtype=dtype_name(TRUTH[dtype]),
        factor=factor,
        positions=len(owners),
        errors=logit_errors(ours, truth, k),
        noise=logit_errors(noise, truth, k),
        stages=stages,
        layer=layer,
        logits=place(first_excess(["logits"], [logit_rows], [noise_rows], factor, dtype)),
        error_by_position=tuple(logit_rows[:first].tolist()),
        noise_by_position=tuple(noise_rows[:first].tolist()),
    )


def stage_names(num_layers: int) -> list[str]:
    """Names of the stages of `LayerOutputs`, in the order of computing."""
    return ["embedding", *(f"layer {layer}" for layer in range(num_layers)), "final norm", "logits"]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _sides(runs: Sequence[ReferenceRun]) -> tuple[list[LayerOutputs], list[LayerOutputs]]:
    return [run.truth for run in runs], [run.noise for run in runs]


def _stage_rows(
    runs: Sequence[ReferenceRun], layers: Sequence[LayerOutputs]
) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor]]:
    """Names, and relative errors [rows of all prompts] of ours and of the noise, per stage."""
    truth, noise, ours = (
        [torch.cat(parts) for parts in zip(*map(_stages, outputs), strict=True)] for outputs in (*_sides(runs), layers)
    )
    names = stage_names(len(truth) - 3)
    return names, list(map(row_errors, ours, truth)), list(map(row_errors, noise, truth))


def _stages(outputs: LayerOutputs) -> list[torch.Tensor]:
    return [*outputs.residuals, outputs.hidden, outputs.logits]


def _stage_errors(stage: str, ours: torch.Tensor, noise: torch.Tensor) -> StageErrors:
    return StageErrors(stage, float(ours.median()), float(ours.max()), float(noise.median()), float(noise.max()))
