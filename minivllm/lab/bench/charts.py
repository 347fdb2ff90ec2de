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
COLOURS = "abcdef"
DODGE = 5.0  # between the whiskers of two lines at one place

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
    """Points in the order in which they are joined.  ``upward`` and ``across``: of each point the interval of its y and
    of its x, None if it has none; empty if no point has one."""

    name: str
    points: tuple[Point, ...]
    upward: tuple[Point | None, ...] = ()
    across: tuple[Point | None, ...] = ()

    def whiskers(self) -> list[tuple[Point, Point]]:
        """Return both ends of each interval."""
        up = [((p[0], s[0]), (p[0], s[1])) for p, s in zip(self.points, self.upward, strict=False) if s]
        return up + [((s[0], p[1]), (s[1], p[1])) for p, s in zip(self.points, self.across, strict=False) if s]


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
    """Return the SVG of a ``BarChart``.  The axis holds every interval, below 0 too."""
    shown = [row for row in rows if math.isfinite(row.value)]
    least, most = span_of(shown, mark)
    scale = (WIDTH - LEFT - 70) / (most - least)
    place = lambda value: LEFT + (value - least) * scale  # noqa: E731
    parts = []
    for i, row in enumerate(shown):
        y = TOP + i * ROW
        begin, end = sorted((place(0.0), place(row.value)))
        parts.append(_text(LEFT - 8, y + 16, short(row.name), "end"))
        parts.append(f'<rect class="a" x="{begin:.1f}" y="{y + 3}" width="{end - begin:.1f}" height="{ROW - 8}"/>')
        if row.low is not None and row.high is not None:
            a, b, at = place(row.low), place(row.high), y + ROW / 2 - 1
            parts.append(f'<path class="e" d="M{a:.1f} {at}H{b:.1f}M{a:.1f} {at - 4}v8M{b:.1f} {at - 4}v8"/>')
            end = max(end, b)
        if row.tick is not None:
            at = place(row.tick)
            parts.append(f'<path class="k" d="M{at:.1f} {y + 1}v{ROW - 4}"/>')
            end = max(end, at)
        parts.append(_text(end + 6, y + 16, number(row.value)))
    height = TOP + len(shown) * ROW + 6
    for line in [0.0] * (least < 0) + ([mark] if mark is not None else []):
        parts.append(f'<path class="m" d="M{place(line):.1f} {TOP}V{height - 6}"/>')
    return _svg(height, label, parts)


def span_of(rows: Sequence[Bar], mark: float | None = None) -> Point:
    """Return the ends of an axis that holds all bars from 0, their intervals, their ticks and the mark."""
    values = [one for row in rows for one in (row.value, row.low, row.high, row.tick) if one is not None]
    values = [one for one in [*values, mark or 0.0] if math.isfinite(one)]
    least, most = min([0.0, *values]), max([0.0, *values])
    return least, most if most > least else least + 1.0


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
    whiskers = [end for line in found for pair in line.whiskers() for end in pair]
    points = [p for p in [*(p for line in found for p in line.points), *whiskers] if p[1] > 0 or not log]
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
        shift = DODGE * (i - (len(found) - 1) / 2)
        parts += [_whisker(at(a), at(b), f"l{kind}", shift) for a, b in line.whiskers()]
    named = [line.name for line in found if line.name] if len(found) > 1 else []
    return _svg(LOW + 44 + 20 * len(named), f"{y_name} over {x_name}", parts + _legend(named, left, LOW + 44))


def _whisker(a: Point, b: Point, style: str, shift: float) -> str:
    """Return the line between two ends with a bar across each; an upright one is ``shift`` to the right."""
    upright = abs(a[0] - b[0]) < 0.05
    if upright:
        a, b = (a[0] + shift, a[1]), (b[0] + shift, b[1])
    caps = (f"M{x - 4:.1f} {y:.1f}h8" if upright else f"M{x:.1f} {y - 4:.1f}v8" for x, y in (a, b))
    return f'<path class="{style}" d="M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}{"".join(caps)}"/>'


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
    """Return the numbers at which an axis is marked."""
    step = _step(max(high, -low)) if from_zero else _step(high - low)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    return [10.0**i for i in range(first, last + 1)]


def _range(values: Sequence[float], from_zero: bool) -> Point:
    """Return the ends of an axis."""
    if not values:
        return 0.0, 1.0
    if from_zero:
        least, most = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
        step = _step(max(most, -least) or 1.0)
        ends = step * math.floor(least / step + 1e-9), step * math.ceil(most / step - 1e-9)
        return ends if ends[1] > ends[0] else (0.0, step * math.ceil(1.0 / step - 1e-9))
    room = 0.2 * (max(values) - min(values)) or 0.1 * abs(max(values)) or 1.0
    return min(values) - room, max(values) + room
