"""Charts as data, and as SVG text: bars with error bars, lines and points, parts of a whole, requests over time.

Colours are variables of the page's style sheet.  ``plot`` draws the same charts by matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, LEFT, ROW, TOP = 640, 230, 26, 8
LONGEST = 30  # characters of a name beside a bar
LOW, FEW = 220, 16  # where the axis of a chart with lines lies; points of a line that are drawn one by one
THIN = 12  # height of a request in a timeline
FARTHEST = 1.5  # times the longest bar, where the axis of bars ends at most
COLOURS = "abcdef"

Point = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """One value with its interval, if it has one.  ``tick``: a value to compare it with, in its row."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    tick: float | None = None


@dataclass(frozen=True)
class DrawnLine:
    """Points in the order in which they are joined."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars from 0.  ``mark``: a value at which a line is drawn, as 1 where ratios are shown."""

    title: str
    rows: Sequence[Bar]
    mark: float | None = None

    def svg(self) -> str:
        return bars(self.rows, self.title, self.mark)


@dataclass(frozen=True)
class StackChart:
    """Parts of a whole."""

    title: str
    rows: Sequence[Bar]

    def svg(self) -> str:
        return stack(self.rows, self.title)


@dataclass(frozen=True)
class LineChart:
    """Lines from 0, or from the lowest power of ten (``log``, of y); not ``joined``: points, over axes about as wide as
    they lie apart, with ``front`` through those that no other beats."""

    title: str
    lines: Sequence[DrawnLine]
    x_name: str
    y_name: str
    joined: bool = True
    log: bool = False
    front: tuple[Point, ...] = ()

    def svg(self) -> str:
        return lines(self.lines, self.x_name, self.y_name, self.joined, self.log, self.front)


@dataclass(frozen=True)
class Span:
    """A request: when it was sent, when its first token came, and its last."""

    start: float
    first: float
    end: float


@dataclass(frozen=True)
class TimelineChart:
    """A row for each request."""

    title: str
    rows: Sequence[Span]

    def svg(self) -> str:
        return timeline(self.rows, self.title)


@dataclass(frozen=True)
class Table:
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]


Chart = BarChart | StackChart | LineChart | TimelineChart
Block = Chart | Table | str  # of a report; a text is a sentence
Row = Mapping[str, Any]  # of a result


def number(value: float) -> str:
    """Short: three digits that count."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[1 - LONGEST // 2 :]}"


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label, quote=True)}">{inside}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: Sequence[str], left: float, top: float) -> list[str]:
    """A square and a name each, one below the other."""
    out = []
    for i, name in enumerate(names):
        y = top + 20 * i
        out.append(f'<rect class="{COLOURS[i % len(COLOURS)]}" x="{left}" y="{y}" width="12" height="12"/>')
        out.append(_text(left + 18, y + 10, name))
    return out


def bars(rows: Sequence[Bar], label: str, mark: float | None = None) -> str:
    """As ``BarChart``."""
    shown = [row for row in rows if math.isfinite(row.value)]
    values = [max(row.value, row.tick or 0.0) for row in shown]
    most = FARTHEST * max(values, default=0.0) or math.inf  # a wide interval leaves room for the bars, if there are any
    ends = [min(row.high or 0.0, most) for row in shown]
    most = max(values + ends + ([mark] if mark else []), default=1.0) or 1.0
    scale = (WIDTH - LEFT - 70) / most
    parts = []
    for i, row in enumerate(shown):
        y = TOP + i * ROW
        end = LEFT + max(0.0, row.value) * scale
        parts.append(_text(LEFT - 8, y + 16, short(row.name), "end"))
        parts.append(f'<rect class="a" x="{LEFT}" y="{y + 3}" width="{end - LEFT:.1f}" height="{ROW - 8}"/>')
        if row.low is not None and row.high is not None:
            a, b, at = LEFT + max(0.0, row.low) * scale, LEFT + min(row.high, most) * scale, y + ROW / 2 - 1
            last = f"M{b:.1f} {at - 4}v8" if row.high <= most else ""  # else it goes on
            parts.append(f'<path class="e" d="M{a:.1f} {at}H{b:.1f}M{a:.1f} {at - 4}v8{last}"/>')
            end = max(end, b)
        if row.tick is not None:
            at = LEFT + row.tick * scale
            parts.append(f'<path class="k" d="M{at:.1f} {y + 1}v{ROW - 4}"/>')
            end = max(end, at)
        parts.append(_text(end + 6, y + 16, number(row.value)))
    height = TOP + len(shown) * ROW + 6
    if mark is not None:
        x = LEFT + mark * scale
        parts.append(f'<path class="m" d="M{x:.1f} {TOP}V{height - 6}"/>')
    return _svg(height, label, parts)


def stack(rows: Sequence[Bar], label: str) -> str:
    """As ``StackChart``, one beside the other, with a legend."""
    whole = sum(row.value for row in rows) or 1.0
    x, parts = 10.0, []
    for i, row in enumerate(rows):
        wide = (WIDTH - 20) * row.value / whole
        kind = COLOURS[i % len(COLOURS)]
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="30"/>')
        x += wide
    parts += _legend([f"{row.name}: {number(row.value)}" for row in rows], 10, TOP + 38)
    return _svg(TOP + 50 + 20 * len(rows), label, parts)


def lines(
    found: Sequence[DrawnLine],
    x_name: str,
    y_name: str,
    joined: bool = True,
    log: bool = False,
    front: Sequence[Point] = (),
) -> str:
    """As ``LineChart``."""
    points = [point for line in found for point in line.points if point[1] > 0 or not log]
    low, high = zip(*(_range([p[axis] for p in points], joined) for axis in (0, 1)), strict=True)
    if log:
        low, high = (low[0], _decade([p[1] for p in points], False)), (high[0], _decade([p[1] for p in points], True))
    wide, left, most = WIDTH - 90, 60, LOW - 30
    up = math.log10 if log else float

    def at(point: Point) -> Point:
        x = (point[0] - low[0]) / (high[0] - low[0])
        y = (up(max(point[1], low[1])) - up(low[1])) / (up(high[1]) - up(low[1]))
        return left + x * wide, LOW - y * most

    def way(some: Sequence[Point]) -> str:
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in map(at, some))

    parts = [f'<path class="x" d="M{left} 24V{LOW}H{left + wide}"/>']
    for mark in _marks(low[0], high[0], joined):
        parts.append(_text(at((mark, low[1]))[0], LOW + 16, number(mark), "middle"))
    for mark in _powers(low[1], high[1]) if log else _marks(low[1], high[1], joined):
        y = at((low[0], mark))[1]
        parts.append(_text(left - 6, y + 4, number(mark), "end"))
        parts.append(f'<path class="g" d="M{left} {y:.1f}H{left + wide}"/>' if y < LOW - 1 else "")
    parts += [_text(left + wide, LOW + 34, x_name, "end"), _text(4, 14, y_name)]
    if len(front) > 1:
        parts.append(f'<path class="m" d="{way(front)}"/>')
    for i, line in enumerate(found):
        kind = COLOURS[i % len(COLOURS)]
        if joined and len(line.points) > 1:
            parts.append(f'<path class="l{kind}" d="{way(line.points)}"/>')
        if len(line.points) < FEW or not joined:
            parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in map(at, line.points)]
    named = [line.name for line in found if line.name] if len(found) > 1 else []
    return _svg(LOW + 44 + 20 * len(named), f"{y_name} over {x_name}", parts + _legend(named, left, LOW + 44))


def timeline(rows: Sequence[Span], label: str) -> str:
    """As ``TimelineChart``, in the order of their arrivals."""
    ordered = sorted(rows, key=lambda row: row.start)
    last = max((row.end for row in ordered), default=1.0) or 1.0
    wide, left = WIDTH - 20, 10
    parts = []
    for i, row in enumerate(ordered):
        y, ends = TOP + i * THIN, [left + wide * t / last for t in (row.start, row.first, row.end)]
        for kind, a, b in (("b", ends[0], ends[1]), ("a", ends[1], ends[2])):
            parts.append(
                f'<rect class="{kind}" x="{a:.1f}" y="{y}" width="{max(0.0, b - a):.1f}" height="{THIN - 3}"/>'
            )
    low = TOP + len(ordered) * THIN
    parts.append(f'<path class="x" d="M{left} {low}H{left + wide}"/>')
    for share in (0.0, 0.5, 1.0):
        anchor = ("start", "middle", "end")[round(2 * share)]
        parts.append(_text(left + share * wide, low + 16, f"{number(share * last)} s", anchor))
    for i, (kind, name) in enumerate((("b", "waits, and its prompt is computed"), ("a", "answers"))):
        parts.append(f'<rect class="{kind}" x="{left + 260 * i}" y="{low + 26}" width="12" height="12"/>')
        parts.append(_text(left + 260 * i + 18, low + 36, name))
    return _svg(low + 44, label, parts)


def _decade(values: Sequence[float], up: bool) -> float:
    """The power of ten above or below all."""
    if not values:
        return 10.0 if up else 1.0
    exponent = math.log10(max(values) if up else min(values))
    return 10.0 ** (math.floor(exponent) + 1 if up else math.floor(exponent))


def _step(most: float) -> float:
    """Between marks from 0 to ``most``: 1, 2 or 5 times a power of ten, so that there are three to seven."""
    unit = 10.0 ** math.floor(math.log10(most))
    return next(unit * part for part in (0.2, 0.5, 1.0, 2.0) if most <= 6 * unit * part)


def _marks(low: float, high: float, from_zero: bool) -> list[float]:
    """Where an axis has numbers."""
    if not from_zero:
        step = _step(high - low)
        return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    step = _step(high)
    return [step * i for i in range(round(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    return [10.0**i for i in range(first, last + 1)]


def _range(values: Sequence[float], from_zero: bool) -> Point:
    """The ends of an axis."""
    if not values:
        return 0.0, 1.0
    if from_zero:
        step = _step(max(values) or 1.0)
        return 0.0, step * math.ceil((max(values) or 1.0) / step - 1e-9)
    room = 0.2 * (max(values) - min(values)) or 0.1 * abs(max(values)) or 1.0
    return min(values) - room, max(values) + room
