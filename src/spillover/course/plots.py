"""Plots of a row of the table of metrics: SVG in the page's own colours, so that it follows light and dark."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from markupsafe import Markup, escape

from spillover.course.tables import Filled, number

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34
COLORS = 8
_Scale = Callable[[float], float]
LINES_FROM = 3  # number of columns from which a sweep is drawn as lines; others are bars
_POINT = re.compile(r"(^|.* )([\d.]+|inf)")  # a column heading that is one value of a sweep


def plot(filled: Filled) -> Markup | None:
    """Draw lines over a sweep, and bars over other columns; return None if nothing was measured."""
    if not filled.measured:
        return None
    top = max(value for _, cells in filled.rows for cell in cells if cell is not None
              for value in (cell.median or 0.0,))
    ticks = _ticks(top)
    height = ticks[-1] or 1.0

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / height)

    step = (WIDTH - LEFT - RIGHT) / len(filled.columns)
    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
             f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>' for tick in ticks]
    parts += [f'<text x="{LEFT + (index + 0.5) * step:.1f}" y="{HEIGHT - 12}" text-anchor="middle">'
              f"{escape(column)}</text>"
              for index, column in enumerate(filled.columns)]
    swept = len(filled.columns) >= LINES_FROM and all(map(_POINT.fullmatch, filled.columns))
    draw = _line if swept else _bars
    for index, (name, cells) in enumerate(filled.rows):
        values = [None if cell is None else cell.median for cell in cells]
        parts += draw(name, values, index, len(filled.rows), step, y)
    label = escape(f"{filled.row.name}, {filled.row.unit}")
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


def color(index: int) -> str:
    return f"var(--arm-{index % COLORS})"


def _line(name: str, values: list[float | None], index: int, _count: int, step: float, y: _Scale) -> list[str]:
    points = [(LEFT + (at + 0.5) * step, y(value)) for at, value in enumerate(values) if value is not None]
    path = " ".join(f"{x:.1f},{height:.1f}" for x, height in points)
    return [f'<polyline points="{path}" fill="none" stroke="{color(index)}" stroke-width="2"/>',
            *(f'<circle cx="{x:.1f}" cy="{height:.1f}" r="3" fill="{color(index)}">'
              f"<title>{escape(name)}</title></circle>"
              for x, height in points)]


def _bars(name: str, values: list[float | None], index: int, count: int, step: float, y: _Scale) -> list[str]:
    width = 0.8 * step / count
    return [f'<rect x="{LEFT + at * step + 0.1 * step + index * width:.1f}" y="{y(value):.1f}" '
            f'width="{max(1.0, width - 2):.1f}" height="{y(0) - y(value):.1f}" fill="{color(index)}">'
            f"<title>{escape(name)}: {number(value)}</title></rect>"
            for at, value in enumerate(values) if value is not None]


def _ticks(top: float) -> list[float]:
    """Return four or five round tick values from 0 to at least the largest value."""
    if top <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** math.floor(math.log10(top / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor * 4 >= top)
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]
