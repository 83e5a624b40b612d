"""Line charts as SVG text: light axes, a band for the interval, the name at the end of each line.

The SVG has attributes and classes but no inline styles, so that a page's Content-Security-Policy can stay strict. Colours come
from the page's style sheet (classes ``s0`` … ``s5``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .html import escape

AxisScale = Callable[[float], float]
COLOURS = 6
NARROW = 372  # width of a chart on a phone
MOST_POINTS = 400
"""Largest number of points of a drawn line. Longer lines are thinned."""


@dataclass(frozen=True, slots=True)
class Series:
    """Line of a chart: its points, and their intervals if they are known."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())
    dots: bool = False

    @property
    def constant(self) -> float | None:
        """Return the value of a constant line, else None."""
        y = [v for v in self.y if math.isfinite(v)]
        return y[0] if y and max(y) - min(y) <= 1e-12 * max(1.0, abs(y[0])) else None


def chart(
    title: str,
    series: Sequence[Series],
    *,
    width: int = 560,
    height: int = 210,
    unit: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw a chart over steps, with a title. ``marks`` are vertical lines with a tooltip, such as alarms.

    A wide chart is drawn twice. A narrow screen shows the second drawing, whose text stays readable.
    """
    series = [_finite(_thinned(s)) for s in series]
    series = [s for s in series if len(s.x)]
    if not series:
        return ""
    drawn = _svg(title, series, width, height, unit, marks, "wide" if width > NARROW else "")
    if width > NARROW:
        drawn += _svg(title, series, NARROW, 200, unit, marks, "narrow")
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{drawn}</figure>'


def _svg(
    title: str,
    series: Sequence[Series],
    width: int,
    height: int,
    unit: str,
    marks: Sequence[tuple[float, str]],
    kind: str,
) -> str:
    left, top, bottom = 46, 20, 34
    right = 12 + 6.4 * max(len(s.name) for s in series) if len(series) > 1 else 16
    x0, x1 = min(min(s.x) for s in series), max(max(s.x) for s in series)
    low, high = _extent(series)
    ticks = nice_ticks(low, high)
    y0, y1 = min(ticks[0], low), max(ticks[-1], high)

    def px(x: float) -> float:
        return left + ((x - x0) / (x1 - x0) if x1 > x0 else 0.5) * (width - left - right)

    def py(y: float) -> float:
        return top + (y1 - min(y1, max(y0, y))) / ((y1 - y0) or 1) * (height - top - bottom)

    ends = ", ".join(f"{s.name or 'value'} {s.y[0]:.4g} to {s.y[-1]:.4g}" for s in series)
    parts = [
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(f"{title}, steps {short(x0)} to {short(x1)}: {ends}")}">'
        f'<text class="axis" x="4" y="10">{escape("" if unit == title else unit)}</text>'
        f'<text class="axis" x="{(left + width - right) / 2:.0f}" y="{height - 4}" text-anchor="middle">step</text>'
    ]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right:.0f}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>'
                     f'<text class="tick" x="{left - 6}" y="{py(tick) + 3.5:.1f}" text-anchor="end">{short(tick)}</text>')  # fmt: skip
    for x in _steps(x0, x1):
        parts.append(
            f'<text class="tick" x="{px(x):.1f}" y="{height - bottom + 14}" text-anchor="middle">{short(x)}</text>'
        )
    for x, words in marks:
        if x0 <= x <= x1:
            parts.append(
                f'<line class="mark" x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{top}" y2="{height - bottom}"><title>{escape(words)}</title></line>'
            )
    for i, s in enumerate(series):
        parts.append(_line(s, i % COLOURS, px, py))
    if len(series) > 1:
        parts += _end_labels(series, px, py, top, height - bottom)
    return "".join([*parts, "</svg>"])


def _steps(first: float, last: float) -> list[float]:
    """Return the ends of the axis, and some round whole numbers between them."""
    room = 0.12 * (last - first)
    between = [
        tick for tick in nice_ticks(first, last) if tick == int(tick) and first + room < tick < last - room
    ]
    return list(dict.fromkeys((first, *between, last)))


def nice_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return a few round numbers that cover the range, with 0 if it is near."""
    if low > 0 and low < 0.4 * high:
        low = 0.0
    if high - low < 1e-9 * max(1.0, abs(high)):  # a constant line is drawn in the middle
        low, high = low - (0.1 * abs(low) or 1.0), high + (0.1 * abs(high) or 1.0)
    span = high - low
    step: float = 10 ** math.floor(math.log10(span / most))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (step * m) <= most)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """Return a short text of a number for an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k".replace("-", "−")
    return f"{value:.3g}".replace("-", "−") if abs(value) < 1e-3 else f"{value:.4g}".replace("-", "−")


def _line(s: Series, colour: int, px: AxisScale, py: AxisScale) -> str:
    at = [(px(x), py(y)) for x, y in zip(s.x, s.y, strict=True)]
    parts = []
    if s.low and s.high:
        upper = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in zip(s.x, s.high, strict=True))
        lower = " ".join(
            f"{px(x):.1f},{py(y):.1f}" for x, y in zip(reversed(s.x), reversed(s.low), strict=True)
        )
        parts.append(f'<polygon class="band s{colour}" points="{upper} {lower}"/>')
    parts.append(f'<polyline class="line s{colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>')
    if s.dots or len(at) <= 60:
        for i, (x, y) in enumerate(at):
            extent = f" [{s.low[i]:.4g}, {s.high[i]:.4g}]" if s.low and s.high else ""
            parts.append(f'<circle class="dot s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{3 if s.dots else 1.6}">'
                         f"<title>{escape(s.name)}, step {s.x[i]:g}: {s.y[i]:.4g}{extent}</title></circle>")  # fmt: skip
    return "".join(parts)


def _end_labels(
    series: Sequence[Series], px: AxisScale, py: AxisScale, top: float, bottom: float
) -> list[str]:
    """Draw the names beside the ends of the lines, moved apart if they would overlap."""
    ends = sorted((py(s.y[-1]), i) for i, s in enumerate(series))
    y = top
    placed: list[tuple[float, int]] = []
    for want, i in ends:
        y = max(y, want)
        placed.append((y, i))
        y += 13
    over = max(0.0, placed[-1][0] - bottom)
    x = max(px(s.x[-1]) for s in series) + 8
    return [
        f'<text class="name s{i % COLOURS}" x="{x:.1f}" y="{at - over + 4:.1f}">{escape(series[i].name)}</text>'
        for at, i in placed
    ]


def _extent(series: Sequence[Series]) -> tuple[float, float]:
    """Return the range to draw: all lines, and of their intervals as much again, because those of two seeds are wide."""
    low, high = min(min(s.y) for s in series), max(max(s.y) for s in series)
    room = (high - low) or 0.1 * abs(high) or 1.0
    wide = [v for s in series for v in (*s.low, *s.high)]
    return max(low - room, min([low, *wide])), min(high + room, max([high, *wide]))


def _finite(s: Series) -> Series:
    keep = [i for i, y in enumerate(s.y) if math.isfinite(y)]
    x, y, low, high = ([values[i] for i in keep] if values else [] for values in (s.x, s.y, s.low, s.high))
    return Series(s.name, x, y, low, high, s.dots)


def _thinned(s: Series) -> Series:
    every = max(1, -(-len(s.x) // MOST_POINTS))
    return (
        s
        if every == 1
        else Series(s.name, s.x[::every], s.y[::every], s.low[::every], s.high[::every], s.dots)
    )
