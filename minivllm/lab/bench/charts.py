"""Charts as data, and as SVG text: bars with intervals, lines and points, parts of a whole, requests over time.

Colours are variables of the page's style sheet.  ``plot`` draws the same charts with matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

# sizes in pixels: width of a chart and of the names beside bars, height of a bar, space above the first bar
WIDTH, LEFT, ROW, TOP = 640, 230, 26, 8
LONGEST = 30  # largest number of characters of a name beside a bar
LOW = 220  # y of the x axis of a chart with lines
FEW = 16  # largest number of points of a line for which each point is marked
THIN = 12  # height in pixels of a request in a timeline
COLOURS = "abcdef"  # CSS classes of lines and bars, one for each colour
DODGE = 5.0  # distance of the whiskers of two lines at the same x

Point = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """A bar of a chart, with an optional interval.  ``tick`` is a reference value that is drawn across the bar."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    tick: float | None = None


@dataclass(frozen=True)
class DrawnLine:
    """A line through points, in their order.

    ``upward`` and ``across`` have the intervals of each point's y and x, or None for a point without an interval.  They
    are empty if no point has one.
    """

    name: str
    points: tuple[Point, ...]
    upward: tuple[Point | None, ...] = ()
    across: tuple[Point | None, ...] = ()

    def whiskers(self) -> list[tuple[Point, Point]]:
        """Return the two ends of each interval."""
        ends: list[tuple[Point, Point]] = []
        for (x, _), span in zip(self.points, self.upward, strict=False):
            if span:
                ends.append(((x, span[0]), (x, span[1])))
        for (_, y), span in zip(self.points, self.across, strict=False):
            if span:
                ends.append(((span[0], y), (span[1], y)))
        return ends


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars from 0.  ``mark`` is a value at which a line is drawn, such as 1 for ratios; None means none."""

    title: str
    rows: Sequence[Bar]
    mark: float | None = None

    def svg(self) -> str:
        """Return the chart as SVG."""
        return _bars(self)


@dataclass(frozen=True)
class StackChart:
    """Parts of a whole, in one bar."""

    title: str
    rows: Sequence[Bar]

    def svg(self) -> str:
        """Return the chart as SVG."""
        return _stack(self)


@dataclass(frozen=True)
class LineChart:
    """Lines over axes that begin at 0, or (not ``joined``) points over axes that fit them.

    ``log`` makes the y axis logarithmic, from a power of ten.  ``front`` is a dashed line through the points that no
    other point beats.
    """

    title: str
    lines: Sequence[DrawnLine]
    x_name: str
    y_name: str
    joined: bool = True
    log: bool = False
    front: tuple[Point, ...] = ()

    def svg(self) -> str:
        """Return the chart as SVG."""
        return _lines(self)


@dataclass(frozen=True)
class AxisSpan:
    """The seconds at which a request was sent, got its first token, and got its last token."""

    start: float
    first: float
    end: float


@dataclass(frozen=True)
class TimelineChart:
    """Requests over time, a row for each."""

    title: str
    rows: Sequence[AxisSpan]

    def svg(self) -> str:
        """Return the chart as SVG."""
        return _timeline(self)


@dataclass(frozen=True)
class Table:
    """A table of a report."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]


Chart = BarChart | StackChart | LineChart | TimelineChart
Block = Chart | Table | str  # a part of a report; a string is a paragraph


def number(value: float) -> str:
    """Return a number as text with three significant digits, "-" if it is not finite."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(name: str) -> str:
    """Return a name with at most ``LONGEST`` characters, without its middle if it is longer."""
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST // 2]}…{name[1 - LONGEST // 2 :]}"


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    """Return the SVG element of a chart."""
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label, quote=True)}">{inside}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Return a text element."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: Sequence[str], left: float, top: float) -> list[str]:
    """Return a legend: a coloured square and a name per row."""
    out = []
    for i, name in enumerate(names):
        y = top + 20 * i
        out.append(f'<rect class="{COLOURS[i % len(COLOURS)]}" x="{left}" y="{y}" width="12" height="12"/>')
        out.append(_text(left + 18, y + 10, name))
    return out


def _bars(chart: BarChart) -> str:
    """Return the SVG of a ``BarChart``, whose axis includes all intervals, also below 0."""
    shown = [row for row in chart.rows if math.isfinite(row.value)]
    least, most = span_of(shown, chart.mark)
    scale = (WIDTH - LEFT - 70) / (most - least)

    def place(value: float) -> float:
        return LEFT + (value - least) * scale

    parts = []
    for i, row in enumerate(shown):
        y = TOP + i * ROW
        begin, end = sorted((place(0.0), place(row.value)))
        parts.append(_text(LEFT - 8, y + 16, short(row.name), "end"))
        parts.append(f'<rect class="a" x="{begin:.1f}" y="{y + 3}" width="{end - begin:.1f}" height="{ROW - 8}"/>')
        if row.low is not None and row.high is not None:
            low = place(row.low)
            high = place(row.high)
            middle = y + ROW / 2 - 1
            caps = f"M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
            parts.append(f'<path class="e" d="M{low:.1f} {middle}H{high:.1f}{caps}"/>')
            end = max(end, high)
        if row.tick is not None:
            tick = place(row.tick)
            parts.append(f'<path class="k" d="M{tick:.1f} {y + 1}v{ROW - 4}"/>')
            end = max(end, tick)
        parts.append(_text(end + 6, y + 16, number(row.value)))
    height = TOP + len(shown) * ROW + 6
    verticals = [0.0] if least < 0 else []
    if chart.mark is not None:
        verticals.append(chart.mark)
    for line in verticals:
        parts.append(f'<path class="m" d="M{place(line):.1f} {TOP}V{height - 6}"/>')
    return _svg(height, chart.title, parts)


def span_of(rows: Sequence[Bar], mark: float | None = None) -> Point:
    """Return the ends of an axis for all bars from 0, with their intervals, their ticks and the mark."""
    values = [0.0, mark or 0.0]
    for row in rows:
        values += [value for value in (row.value, row.low, row.high, row.tick) if value is not None]
    finite = [value for value in values if math.isfinite(value)]
    least = min(finite)
    most = max(finite)
    return least, most if most > least else least + 1.0


def _stack(chart: StackChart) -> str:
    """Return the SVG of a ``StackChart``, with a legend."""
    whole = sum(row.value for row in chart.rows) or 1.0
    x = 10.0
    parts = []
    for i, row in enumerate(chart.rows):
        width = (WIDTH - 20) * row.value / whole
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<rect class="{colour}" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="30"/>')
        x += width
    parts += _legend([f"{row.name}: {number(row.value)}" for row in chart.rows], 10, TOP + 38)
    return _svg(TOP + 50 + 20 * len(chart.rows), chart.title, parts)


class _Axes:
    """The axes of a chart with lines, from the values ``low`` to the values ``high``, (x, y) each."""

    left = 60
    width = WIDTH - 90
    height = LOW - 30

    def __init__(self, points: Sequence[Point], joined: bool, log: bool) -> None:
        self.joined = joined
        self.log = log
        xs = [x for x, _ in points]
        ys = [y for _, y in points]
        self.low_x, self.high_x = _range(xs, joined)
        if log:
            self.low_y = _decade(ys, False)
            self.high_y = _decade(ys, True)
        else:
            self.low_y, self.high_y = _range(ys, joined)

    def place(self, point: Point) -> Point:
        """Return x and y, in pixels of the chart, for a point (x, y) of the data."""
        up = math.log10 if self.log else float
        x = (point[0] - self.low_x) / (self.high_x - self.low_x)
        bottom = up(self.low_y)
        height = up(max(point[1], self.low_y)) - bottom
        y = height / (up(self.high_y) - bottom)
        return self.left + x * self.width, LOW - y * self.height

    def path(self, points: Sequence[Point]) -> str:
        """Return the SVG path through some points."""
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in map(self.place, points))

    def parts(self) -> list[str]:
        """Return the axes with their numbers and horizontal grid lines."""
        right = self.left + self.width
        parts = [f'<path class="x" d="M{self.left} 24V{LOW}H{right}"/>']
        for mark in _marks(self.low_x, self.high_x, self.joined):
            x, _ = self.place((mark, self.low_y))
            parts.append(_text(x, LOW + 16, number(mark), "middle"))
        y_marks = _powers if self.log else partial(_marks, from_zero=self.joined)
        for mark in y_marks(self.low_y, self.high_y):
            _, y = self.place((self.low_x, mark))
            parts.append(_text(self.left - 6, y + 4, number(mark), "end"))
            if y < LOW - 1:
                parts.append(f'<path class="g" d="M{self.left} {y:.1f}H{right}"/>')
        return parts


def _lines(chart: LineChart) -> str:
    """Return the SVG of a ``LineChart``."""
    points: list[Point] = []
    for line in chart.lines:
        points += line.points
        for ends in line.whiskers():
            points += ends
    shown = [point for point in points if point[1] > 0 or not chart.log]
    axes = _Axes(shown, chart.joined, chart.log)
    parts = axes.parts()
    parts.append(_text(axes.left + axes.width, LOW + 34, chart.x_name, "end"))
    parts.append(_text(4, 14, chart.y_name))
    if len(chart.front) > 1:
        parts.append(f'<path class="m" d="{axes.path(chart.front)}"/>')
    middle = (len(chart.lines) - 1) / 2
    for i, line in enumerate(chart.lines):
        colour = COLOURS[i % len(COLOURS)]
        if chart.joined and len(line.points) > 1:
            parts.append(f'<path class="l{colour}" d="{axes.path(line.points)}"/>')
        if len(line.points) < FEW or not chart.joined:
            for x, y in map(axes.place, line.points):
                parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        for a, b in line.whiskers():
            parts.append(_whisker(axes.place(a), axes.place(b), f"l{colour}", DODGE * (i - middle)))
    named = [line.name for line in chart.lines if line.name]
    if len(chart.lines) == 1:
        named = []
    parts += _legend(named, axes.left, LOW + 44)
    return _svg(LOW + 44 + 20 * len(named), f"{chart.y_name} over {chart.x_name}", parts)


def _whisker(a: Point, b: Point, style: str, shift: float) -> str:
    """Return the SVG of an interval with a cap at each end; a vertical one is moved to the right by ``shift``."""
    upright = abs(a[0] - b[0]) < 0.05
    if upright:
        a = (a[0] + shift, a[1])
        b = (b[0] + shift, b[1])
    path = f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}"
    for x, y in (a, b):
        path += f"M{x - 4:.1f} {y:.1f}h8" if upright else f"M{x:.1f} {y - 4:.1f}v8"
    return f'<path class="{style}" d="{path}"/>'


def _timeline(chart: TimelineChart) -> str:
    """Return the SVG of a ``TimelineChart``, with requests in the order of their starts."""
    ordered = sorted(chart.rows, key=lambda row: row.start)
    last = max((row.end for row in ordered), default=1.0) or 1.0
    left = 10
    width = WIDTH - 20
    parts = []
    for i, row in enumerate(ordered):
        y = TOP + i * THIN
        start, first, end = (left + width * seconds / last for seconds in (row.start, row.first, row.end))
        for colour, a, b in (("b", start, first), ("a", first, end)):
            size = f'width="{max(0.0, b - a):.1f}" height="{THIN - 3}"'
            parts.append(f'<rect class="{colour}" x="{a:.1f}" y="{y}" {size}/>')
    low = TOP + len(ordered) * THIN
    parts.append(f'<path class="x" d="M{left} {low}H{left + width}"/>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        parts.append(_text(left + share * width, low + 16, f"{number(share * last)} s", anchor))
    for x, colour, name in ((left, "b", "waits, and its prompt is computed"), (left + 260, "a", "answers")):
        parts.append(f'<rect class="{colour}" x="{x}" y="{low + 26}" width="12" height="12"/>')
        parts.append(_text(x + 18, low + 36, name))
    return _svg(low + 44, chart.title, parts)


def _decade(values: Sequence[float], up: bool) -> float:
    """Return the power of ten above all values (``up``), or at or below all."""
    if up:
        return 10.0 ** (math.floor(math.log10(max(values))) + 1) if values else 10.0
    return 10.0 ** math.floor(math.log10(min(values))) if values else 1.0


def _step(most: float) -> float:
    """Return the distance of marks from 0 to ``most``: 1, 2 or 5 times a power of ten, for three to seven marks."""
    unit = 10.0 ** math.floor(math.log10(most))
    return next(unit * part for part in (0.2, 0.5, 1.0, 2.0) if most <= 6 * unit * part)


def _marks(low: float, high: float, from_zero: bool) -> list[float]:
    """Return the numbers at which an axis from ``low`` to ``high`` is marked, multiples of a round step.

    The step is chosen for the distance from 0 if ``from_zero``, otherwise for the distance from ``low``.
    """
    step = _step(max(high, -low) if from_zero else high - low)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return the powers of ten at which a logarithmic axis is marked."""
    first = round(math.log10(low))
    last = round(math.log10(high))
    return [10.0**i for i in range(first, last + 1)]


def _range(values: Sequence[float], from_zero: bool) -> Point:
    """Return the ends of an axis; one ``from_zero`` includes 0 and ends at marks."""
    if not values:
        return 0.0, 1.0
    least = min(values)
    most = max(values)
    if not from_zero:
        room = 0.2 * (most - least) or 0.1 * abs(most) or 1.0
        return least - room, most + room
    least = min(0.0, least)
    most = max(0.0, most)
    step = _step(max(most, -least) or 1.0)
    low = step * math.floor(least / step + 1e-9)
    high = step * math.ceil(most / step - 1e-9)
    if high > low:
        return low, high
    return 0.0, step * math.ceil(1.0 / step - 1e-9)
