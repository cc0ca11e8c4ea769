"""What benchmarks/growth.py makes of its measurements."""

import importlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("growth")


def test_a_point_measured_again_takes_the_place_of_the_first(growth: Any, tmp_path: Path) -> None:
    for decode in (10.0, 20.0):
        growth.store(tmp_path, growth.Point("batch", "neuron_native", "8", 8.0, decode, None, 1.0))
    growth.store(tmp_path, growth.Point("batch", "neuron_native", "2", 2.0, 5.0, None, 1.0))
    assert [(point.name, point.decode) for point in growth.stored(tmp_path)] == [("2", 5.0), ("8", 20.0)]


def test_the_documents_get_plots_and_one_section_however_often_it_is_written(growth: Any, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\nOther text.\n")
    points = [
        growth.Point(part, route, name, float(x), 12.5, None if part == "batch" else 100.0, 1.25)
        for part, names in growth.POINTS.items()
        for x, name in enumerate(names, start=1)
        for route in growth.ROUTES
        if (part, route) != ("context", "vllm_neuron")
    ]
    growth.write_docs(tmp_path, points)
    once = page.read_text()
    growth.write_docs(tmp_path, points)
    assert page.read_text() == once and once.startswith("# Performance\n\nOther text.\n")
    images = re.findall(r"!\[.+\]\((.+)\)", once)
    assert len(images) == len(growth.CHARTS) and {path.name for path in tmp_path.glob("*.svg")} == set(images)
    for image in images:
        ET.parse(tmp_path / image)
    assert "| context of 128 tokens | 12.5 | - | 100.0 | - | 1.25 | - |\n" in once
    assert "| tiny model | 12.5 | 12.5 | 100.0 | 100.0 | 1.25 | 1.25 |\n" in once


def test_every_point_leaves_room_for_its_steps(growth: Any) -> None:
    for part, names in growth.POINTS.items():
        for name in names:
            setup = growth.setup_of(part, name)
            assert setup.prompt + growth.ROOM <= setup.context and setup.step % 128 == 0
