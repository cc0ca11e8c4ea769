"""Benchmark results by name, kept as JSON, and compared with those of the last run."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

NOTABLE = 0.10
"""Changes beyond this share are pointed out; less is noise on a shared machine."""


@dataclass(frozen=True)
class Result:
    """One figure.

    Attributes:
        value: the figure.
        unit: of it.
        less_is_better: whether a smaller value is an improvement.
    """

    value: float
    unit: str
    less_is_better: bool = True


Results = Mapping[str, Result]


@dataclass(frozen=True)
class Change:
    """One figure in two runs; None where a run does not have it."""

    name: str
    before: Result | None
    after: Result | None

    @property
    def ratio(self) -> float | None:
        """After over before; None where either is missing or before is 0."""
        if self.before is None or self.after is None or not self.before.value:
            return None
        return self.after.value / self.before.value

    @property
    def verdict(self) -> str:
        """ "better" or "worse" beyond what is noise, "new", "gone", or nothing."""
        if self.after is None:
            return "gone"
        if self.before is None:
            return "new"
        if self.ratio is None or abs(self.ratio - 1) <= NOTABLE:
            return ""
        return "better" if (self.ratio < 1) == self.after.less_is_better else "worse"


def save(folder: Path, results: Results, when: datetime) -> Path:
    """Write a run into a folder, and return its file, whose name sorts by time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{when:%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=2) + "\n")
    return path


def last(folder: Path) -> tuple[str, dict[str, Result]] | None:
    """Name and results of the latest run in a folder; None if there is none."""
    found = sorted(folder.glob("????????-??????.json"))
    if not found:
        return None
    return found[-1].stem, {name: Result(**fields) for name, fields in json.loads(found[-1].read_text()).items()}


def changes(before: Results, after: Results) -> list[Change]:
    """Every figure of either run, those of the new one first."""
    names = dict.fromkeys([*after, *before])
    return [Change(name, before.get(name), after.get(name)) for name in names]
