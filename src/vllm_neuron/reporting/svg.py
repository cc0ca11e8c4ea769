"""Charts as SVG text: lines, bars and ranges. Nothing but strings, so a report opens without a network or a library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log2, log10

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 34, 64
COLOURS = ("#2a6f97", "#e07a1f", "#5b8c3a", "#8f4f9f", "#a33b3b", "#6b6b6b")
INK, GRID = "#333333", "#dddddd"
TICKS = 5
CHARACTER = 6.6
"""Width of a letter in pixels, about."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axes:
    """Ranges of a chart's axes and the mapping from values to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a value."""
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return round(LEFT + across * width, 1), round(HEIGHT - BOTTOM - up * height, 1)


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    logarithmic: bool = False,
    doubling: bool = False,
) -> str:
    """Lines through the points of each series.

    Points that are not finite, and those that have no logarithm, are left out.

    Args:
        title: above the chart.
        x_label: below it.
        y_label: beside it.
        series: points by name.
        logarithmic: y is drawn as its decimal logarithm.
        doubling: x is drawn as its binary logarithm, with a tick at every x that there is.
    """
    shown = {name: _finite(points, logarithmic, doubling) for name, points in series.items()}
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    axes = Axes(_span(xs, False), _span(ys, not logarithmic))
    ticks = _ticks_of(axes, xs) if doubling else _x_ticks(axes)
    parts = [_frame(title, x_label, y_label), _y_ticks(axes, logarithmic), ticks]
    for index, points in enumerate(shown.values()):
        path = " ".join(f"{x},{y}" for x, y in (axes.at(*point) for point in points))
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 40:
            parts += [_dot(*axes.at(*point), colour) for point in points]
    return _svg([*parts, _legend(list(shown))])


def bar_chart(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float] | None]],
) -> str:
    """Bars in groups: each value is (median, lowest, highest), the last two drawn as a whisker; None is a gap."""
    tops = [value[2] for values in series.values() for value in values if value is not None]
    axes = Axes((0.0, max(1, len(groups))), _span(tops, True))
    parts = [_frame(title, "", y_label), _y_ticks(axes, False)]
    width = 0.8 / max(1, len(series))
    for index, values in enumerate(series.values()):
        colour = COLOURS[index % len(COLOURS)]
        for group, value in enumerate(values):
            if value is None:
                continue
            left = group + 0.1 + index * width
            (x, y), (right, base) = axes.at(left, value[0]), axes.at(left + width * 0.92, 0)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{right - x:.1f}" height="{max(0.0, base - y):.1f}" fill="{colour}"/>'
            )
            middle, low = axes.at(left + width * 0.46, value[1])
            high = axes.at(0, value[2])[1]
            parts.append(_line(middle, low, middle, high, INK))
    crowded = any(len(name) * CHARACTER > (WIDTH - LEFT - RIGHT) / len(groups) for name in groups)
    for group, name in enumerate(groups):
        x, y = axes.at(group + 0.5, 0)
        if crowded:
            parts.append(f'<g transform="translate({x + 10} {y + 14}) rotate(-18)">{_text(0, 0, name, "end")}</g>')
        else:
            parts.append(_text(x, y + 16, name, "middle"))
    return _svg([*parts, _legend(list(series))])


def _finite(points: Points, logarithmic: bool, doubling: bool) -> list[tuple[float, float]]:
    return [
        (log2(x) if doubling else x, log10(y) if logarithmic else y)
        for x, y in points
        if isfinite(x) and isfinite(y) and (y > 0 or not logarithmic) and (x > 0 or not doubling)
    ]


def _span(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """A range that holds all values and is not empty."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    low = min(0.0, low) if from_zero else low
    return (low, high) if high > low else (low, low + max(1.0, abs(low)))


def _y_ticks(axes: Axes, logarithmic: bool) -> str:
    low, high = axes.y
    decades = range(ceil(low), floor(high) + 1) if logarithmic else ()
    values: Sequence[float] = decades if len(decades) > 1 else _round_values(low, high)
    parts = []
    for value in values:
        x, y = axes.at(axes.x[0], value)
        parts.append(_line(x, y, WIDTH - RIGHT, y, GRID))
        parts.append(_text(x - 6, y + 4, f"{10.0**value:.0e}" if logarithmic else f"{value:.3g}", "end"))
    return "".join(parts)


def _x_ticks(axes: Axes) -> str:
    at = ((value, *axes.at(value, axes.y[0])) for value in _round_values(*axes.x))
    return "".join(_text(x, y + 16, f"{value:.4g}", "middle") for value, x, y in at)


def _ticks_of(axes: Axes, logarithms: Sequence[float]) -> str:
    at = ((2.0**value, *axes.at(value, axes.y[0])) for value in sorted(set(logarithms)))
    return "".join(_text(x, y + 16, f"{value:.4g}", "middle") for value, x, y in at)


def _round_values(low: float, high: float) -> list[float]:
    """About TICKS multiples of 1, 2 or 5 times a power of ten within a range."""
    rough = (high - low) / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [multiple * step for multiple in range(ceil(low / step), floor(high / step) + 1)]


def _frame(title: str, x_label: str, y_label: str) -> str:
    bottom, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<g transform="translate(14 {middle}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>'
    return "".join(
        (
            _text(LEFT, 18, title, "start", bold=True),
            _line(LEFT, TOP, LEFT, bottom, INK),
            _line(LEFT, bottom, WIDTH - RIGHT, bottom, INK),
            _text((LEFT + WIDTH - RIGHT) / 2, bottom + 32, x_label, "middle"),
            turned,
        )
    )


def _legend(names: Sequence[str]) -> str:
    """On the right of the title."""
    widths = [28 + CHARACTER * len(name) for name in names]
    parts, x = [], WIDTH - RIGHT - sum(widths)
    for index, (name, width) in enumerate(zip(names, widths, strict=True)):
        parts.append(f'<rect x="{x:.1f}" y="9" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(_text(round(x + 15, 1), 18, name, "start"))
        x += width
    return "".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{INK}"{weight}>{escape(text)}</text>'


def _svg(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )
