"""Benchmark runs are kept and compared with the last one."""

from datetime import datetime
from pathlib import Path

from vllm_neuron.reporting.history import Result, changes, last, save

BEFORE = {"step": Result(100.0, "us"), "rate": Result(50.0, "tok/s", False), "old": Result(1.0, "us")}
AFTER = {"step": Result(150.0, "us"), "rate": Result(80.0, "tok/s", False), "new": Result(1.0, "us")}


def test_runs_are_kept_and_the_last_one_is_found(tmp_path: Path) -> None:
    assert last(tmp_path) is None
    save(tmp_path, BEFORE, datetime(2026, 1, 2))
    save(tmp_path, AFTER, datetime(2026, 1, 10))
    (tmp_path / "report.json").write_text("{}")
    found = last(tmp_path)
    assert found == ("20260110-000000", AFTER)


def test_what_is_better_depends_on_the_figure() -> None:
    found = {change.name: change for change in changes(BEFORE, AFTER)}
    assert {name: change.verdict for name, change in found.items()} == {
        "step": "worse",
        "rate": "better",
        "new": "new",
        "old": "gone",
    }
    assert found["step"].ratio == 1.5 and found["new"].ratio is None


def test_small_changes_are_noise() -> None:
    (change,) = changes({"a": Result(100.0, "us")}, {"a": Result(109.0, "us")})
    assert change.verdict == ""
