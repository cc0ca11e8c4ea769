"""`vllm-neuron calibrate-kv`: a checkpoint with scales of an FP8 KV cache."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_neuron.cli.errors import CommandError
from vllm_neuron.engine.calibration import calibrate_checkpoint
from vllm_neuron.kernels.cpu.build import KernelBuildError


@dataclass(frozen=True)
class Result:
    """What `vllm-neuron calibrate-kv` did.

    Attributes:
        folder: the new checkpoint.
        tokens: how many it was calibrated with.
        layers: how many have scales.
        largest: the largest magnitude of any key, and that of any value.
    """

    folder: Path
    tokens: int
    layers: int
    largest: tuple[float, float]

    @property
    def summary(self) -> str:
        """The last line of the output."""
        keys, values = self.largest
        return (
            f"{self.folder}: scales of {self.layers} layers from {self.tokens} tokens; keys up to {keys:.4g}, values "
            f"up to {values:.4g}. Serve it with --kv-cache-dtype fp8."
        )


def run(model: Path, output: Path, text: Path, tokens: int, report: Callable[[int], None]) -> Result:
    """Write `output`, the checkpoint of `model` with scales from the first `tokens` tokens of a text file.

    Raises:
        CommandError: it cannot be done.
        OSError: a file cannot be read or written.
    """
    if not (model / "config.json").is_file():
        raise CommandError(f"{model} has no config.json: name a local folder of Hugging Face's form.")
    try:
        done = calibrate_checkpoint(model, output, text.read_text(errors="replace"), tokens, report)
    except (ValueError, KernelBuildError) as error:
        raise CommandError(str(error)) from error
    return Result(output, done.tokens, len(done.scales), done.largest)


def as_json(result: Result) -> str:
    """The result as one JSON object."""
    fields = {**vars(result), "folder": str(result.folder), "largest": list(result.largest)}
    return json.dumps(fields, indent=2)
