"""The whole way: a text with old launches in, the text with new ones out, and what became of everything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_neuron.config import Fault
from vllm_neuron.migration.check import faults_of, unchecked, without
from vllm_neuron.migration.forms.detect import REWRITE, Form, form_of
from vllm_neuron.migration.launch import Launch, LaunchError, Row, Verdict
from vllm_neuron.migration.mapping import map_launch

FlagCheck = Callable[[Launch], list[str]]
"""What vLLM's own parser has to say of a launch's flags."""


@dataclass(frozen=True)
class Migrated:
    """One launch.

    Attributes:
        old: as it was.
        new: as it is now.
        rows: what became of each setting, then what the checks found.
        unchecked: flags and variables whose values are only known when the launch runs.
    """

    old: Launch
    new: Launch
    rows: tuple[Row, ...]
    unchecked: tuple[str, ...]


@dataclass(frozen=True)
class Migration:
    """A text.

    Attributes:
        form: how it is written.
        old: as it was.
        new: as it is now.
        launches: those found in it, in the order in which they were read.
    """

    form: Form
    old: str
    new: str
    launches: tuple[Migrated, ...]

    @property
    def open_rows(self) -> tuple[Row, ...]:
        """Rows that a person has to look at."""
        return tuple(row for launch in self.launches for row in launch.rows if row.verdict.needs_a_person)


def migrate(
    text: str,
    name: str = "",
    keep_tuning: bool = False,
    only_supported: bool = False,
    check_flags: FlagCheck | None = None,
) -> Migration:
    """Migrate every launch of a text.

    Args:
        text: a script, a command line, Python, a Dockerfile, YAML of containers, or the JSON of a NeuronConfig.
        name: of the file it is from.
        keep_tuning: keep --block-size and --num-gpu-blocks-override.
        only_supported: leave out what this release of the plugin refuses as not supported yet.
        check_flags: asked about each new launch too.

    Raises:
        LaunchError: it cannot be read, or nothing in it starts vLLM.
    """
    found: list[Migrated] = []

    def change(old: Launch) -> Launch:
        new, rows = map_launch(old, keep_tuning)
        faults = list(faults_of(new))
        while only_supported and (smaller := _smaller(new, faults)) != new:
            new = smaller
            faults += [fault for fault in faults_of(new) if fault not in faults]
        rows += [_row(fault, only_supported) for fault in faults]
        if check_flags is not None:
            rows += [Row("check", "vLLM's parser", Verdict.DECIDE, "", text) for text in check_flags(new)]
        found.append(Migrated(old, new, tuple(rows), unchecked(new)))
        return new

    form = form_of(text, name)
    new = REWRITE[form](text, change)
    if not found:
        raise LaunchError(
            f"Nothing here starts vLLM. It was read as {form.value}; what is looked for are vllm serve, python -m "
            "vllm.entrypoints.openai.api_server, LLM(...), containers that run one of them, and the JSON of "
            "--override-neuron-config."
        )
    return Migration(form, text, new, tuple(found))


def _row(fault: Fault, left_out: bool) -> Row:
    verdict = Verdict.UNSUPPORTED if fault.later else Verdict.DECIDE
    return Row("check", fault.option, verdict, "left out" if fault.later and left_out else "", str(fault))


def _smaller(launch: Launch, faults: Sequence[Fault]) -> Launch:
    """The launch without everything that is refused as not supported yet."""
    for fault in faults:
        if fault.later:
            launch = without(launch, fault)
    return launch
