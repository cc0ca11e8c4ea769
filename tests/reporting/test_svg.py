"""Charts are XML, hold every value, and fetch nothing."""

import math
import re
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.reporting import page
from vllm_neuron.reporting.svg import HEIGHT, WIDTH, bar_chart, line_chart

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), NUMBERS), max_size=8), st.booleans())
def test_any_points_make_a_chart_inside_its_frame(points: list[tuple[float, float]], logarithmic: bool) -> None:
    root = ET.fromstring(line_chart("<title> & more", "x", "y", {"<series>": points}, logarithmic))
    dots = root.findall(f"{SVG}circle")
    wanted = [y for _, y in points if math.isfinite(y) and (y > 0 or not logarithmic)]
    assert len(dots) == len(wanted)
    assert all(0 <= float(dot.attrib["cx"]) <= WIDTH and 0 <= float(dot.attrib["cy"]) <= HEIGHT for dot in dots)


def test_higher_values_are_drawn_higher() -> None:
    root = ET.fromstring(line_chart("t", "x", "y", {"a": [(0, 1.0), (1, 2.0)]}))
    first, second = root.findall(f"{SVG}circle")
    assert float(second.attrib["cy"]) < float(first.attrib["cy"])


def test_doubled_values_are_as_far_apart_as_doubled_again() -> None:
    chart = line_chart("t", "x", "y", {"a": [(0, 1), (128, 1), (256, 2), (512, 3)]}, doubling=True)
    root = ET.fromstring(chart)
    first, second, third = (float(dot.attrib["cx"]) for dot in root.findall(f"{SVG}circle"))
    assert abs((third - second) - (second - first)) < 0.2
    assert {"128", "256", "512"} <= {text.text for text in root.findall(f"{SVG}text")}


def test_bars_stand_in_proportion_and_gaps_are_left_out() -> None:
    root = ET.fromstring(bar_chart("t", "y", ["g", "h"], {"a": [(2, 1, 3), None], "b": [(1, 1, 1), (4, 4, 4)]}))
    bars = [rect for rect in root.findall(f"{SVG}rect") if "height" in rect.attrib and "x" in rect.attrib][:3]
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert abs(heights[0] / heights[1] - 2) < 0.05 and abs(heights[2] / heights[1] - 4) < 0.05


def test_a_page_fetches_nothing_and_escapes_what_it_is_given() -> None:
    chart = bar_chart("t", "y", ["g"], {"a": [(2, 1, 3)]})
    text = page.page("a < b", page.verdict(False, ["x & y"]), page.table(["c"], [["<b>"], ["1.5"]]), chart)
    assert "a &lt; b" in text and "x &amp; y" in text and "&lt;b&gt;" in text
    links = re.findall(r"(?:src|href)=|url\(|@import|https?://[^\s\"]+", text)
    assert set(links) <= {"http://www.w3.org/2000/svg"}
