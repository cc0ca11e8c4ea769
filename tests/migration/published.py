"""Launches as they were published, in launches/, and what to expect of them."""

import re
from pathlib import Path

import yaml

from vllm_neuron.migration import Migration, Row, migrate

FOLDER = Path(__file__).parent / "launches"
NAMES = sorted(path.name for path in FOLDER.iterdir())
JUDGED: dict[str, dict[str, object]] = yaml.safe_load((FOLDER.parent / "judged.yaml").read_text())


def migrated(name: str, **options: bool) -> Migration:
    """The migration of a launch in the folder."""
    return migrate((FOLDER / name).read_text(), name, **options)


def label(row: Row) -> str:
    """The name of a row's setting, without its value."""
    if row.place == "program":
        return row.old.split()[-1]
    prefix = f"{row.place}." if row.place in ("sampling", "vision") else ""
    return prefix + re.split(r"[ =:]", row.old)[0]


def verdicts(migration: Migration) -> dict[str, list[str]]:
    """Names of settings by verdict, in the order of their rows, without those of the checks."""
    found: dict[str, list[str]] = {}
    for launch in migration.launches:
        for row in launch.rows:
            if row.place != "check":
                found.setdefault(str(row.verdict), []).append(label(row))
    return found
