"""A picture of an estimate: one row per engine, one bar per run of instructions of a name, as SVG."""

from collections.abc import Iterable
from html import escape

from vllm_neuron.kernels.simulator.report import LABEL, Report
from vllm_neuron.kernels.simulator.schedule import Placed

ROWS = ("dma", "tensor", "vector", "scalar", "gpsimd", "sync")
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#edc948", "#bab0ac")
_WIDTH, _ROW, _LEFT, _TOP = 1200, 28, 70, 48


def timeline(report: Report, core: int = 0) -> str:
    """The time line of one core as an SVG document.

    Args:
        report: an estimate.
        core: which core.
    """
    placed = report.timelines[core]
    span = max((p.end for p in placed), default=0.0) or 1.0
    rows = [row for row in ROWS if any(p.engine == row for p in placed)]
    names = sorted({p.instruction.name for p in placed})
    colour = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    height = _TOP + len(rows) * _ROW + 24 * (1 + len(names) // 6) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT + 10}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="16">{escape(report.target.name)}: {report.makespan_us:.1f} us, bound by '
        f"{report.bound} ({LABEL})</text>",
    ]
    scale = _WIDTH / span
    for number, row in enumerate(rows):
        top = _TOP + number * _ROW
        share = report.busy.get(row, 0.0)
        parts.append(f'<text x="4" y="{top + 16}">{row} {share:.0%}</text>')
        for start, end, name in _bars((p for p in placed if p.engine == row), 1 / scale):
            parts.append(
                f'<rect x="{_LEFT + start * scale:.2f}" y="{top}" width="{max((end - start) * scale, 0.3):.2f}" '
                f'height="{_ROW - 8}" fill="{colour[name]}"><title>{escape(name)} {start / 1e3:.2f} to '
                f"{end / 1e3:.2f} us</title></rect>"
            )
    parts += _axis(span, scale, _TOP + len(rows) * _ROW)
    for number, name in enumerate(names):
        x, y = _LEFT + number % 6 * 200, _TOP + len(rows) * _ROW + 34 + 24 * (number // 6)
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bars(placed: Iterable[Placed], resolution: float) -> list[tuple[float, float, str]]:
    """(start, end, name) of stretches of one instruction, those closer than a pixel as one."""
    bars: list[tuple[float, float, str]] = []
    for p in sorted(placed, key=lambda p: p.start):
        name = p.instruction.name
        if bars and bars[-1][2] == name and p.start - bars[-1][1] < resolution:
            bars[-1] = (bars[-1][0], max(bars[-1][1], p.end), name)
        else:
            bars.append((p.start, p.end, name))
    return bars


def _axis(span: float, scale: float, y: float) -> list[str]:
    marks = []
    for step in range(11):
        x = _LEFT + span * step / 10 * scale
        marks.append(f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{y}" stroke="#ddd" stroke-width="0.5"/>')
        marks.append(f'<text x="{x:.1f}" y="{_TOP - 10}" font-size="9">{span * step / 1e4:.1f} us</text>')
    return marks
