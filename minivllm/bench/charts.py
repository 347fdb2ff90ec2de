"""Charts as SVG text: bars with error bars, lines, stacks.  Colours are variables of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, ROW, TOP = 640, 230, 26, 8
LONGEST = 34  # characters of a name beside a bar
LOW, FEW = 220, 30  # where the axis of a chart with lines lies; points of a line that are drawn one by one


@dataclass(frozen=True)
class Bar:
    """One value with its interval, if it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class DrawnLine:
    """Points in the order in which they are joined."""

    name: str
    points: tuple[tuple[float, float], ...]


def number(value: float) -> str:
    """Short: three digits that count."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[1 - LONGEST // 2 :]}"


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">{inside}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def bars(rows: Sequence[Bar], label: str, mark: float | None = None) -> str:
    """Horizontal bars from 0.  ``mark``: a value at which a line is drawn, as 1 where ratios are shown."""
    shown = [row for row in rows if math.isfinite(row.value)]
    most = max([row.high or row.value for row in shown] + ([mark] if mark else []), default=1.0) or 1.0
    scale = (WIDTH - LEFT - 70) / most
    parts = []
    for i, row in enumerate(shown):
        y = TOP + i * ROW
        end = LEFT + max(0.0, row.value) * scale
        parts.append(_text(LEFT - 8, y + 16, _short(row.name), "end"))
        parts.append(f'<rect class="a" x="{LEFT}" y="{y + 3}" width="{end - LEFT:.1f}" height="{ROW - 8}"/>')
        if row.low is not None and row.high is not None:
            a, b, at = LEFT + max(0.0, row.low) * scale, LEFT + row.high * scale, y + ROW / 2 - 1
            parts.append(f'<path class="e" d="M{a:.1f} {at}H{b:.1f}M{a:.1f} {at - 4}v8M{b:.1f} {at - 4}v8"/>')
            end = max(end, b)
        parts.append(_text(end + 6, y + 16, number(row.value)))
    height = TOP + len(shown) * ROW + 6
    if mark is not None:
        x = LEFT + mark * scale
        parts.append(f'<path class="m" d="M{x:.1f} {TOP}V{height - 6}"/>')
    return _svg(height, label, parts)


def stack(rows: Sequence[Bar], label: str) -> str:
    """Parts of a whole, one beside the other, with a legend."""
    whole = sum(row.value for row in rows) or 1.0
    x, parts = 10.0, []
    for i, row in enumerate(rows):
        wide = (WIDTH - 20) * row.value / whole
        parts.append(f'<rect class="{"abcd"[i % 4]}" x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="30"/>')
        x += wide
        y = TOP + 48 + 20 * i
        parts.append(f'<rect class="{"abcd"[i % 4]}" x="10" y="{y - 10}" width="12" height="12"/>')
        parts.append(_text(28, y, f"{row.name}: {number(row.value)}"))
    return _svg(TOP + 50 + 20 * len(rows), label, parts)


def lines(found: Sequence[DrawnLine], x_name: str, y_name: str, joined: bool = True) -> str:
    """Lines over two linear axes from 0; not ``joined``: points, over axes about as wide as they lie apart."""
    points = [point for line in found for point in line.points]
    low, high = zip(*(_range([p[axis] for p in points], joined) for axis in (0, 1)), strict=True)
    wide, left, most = WIDTH - 90, 60, LOW - 30

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = ((point[axis] - low[axis]) / (high[axis] - low[axis]) for axis in (0, 1))
        return left + x * wide, LOW - y * most

    parts = [f'<path class="x" d="M{left} 24V{LOW}H{left + wide}"/>']
    for share in (0.0, 0.5, 1.0):
        x, y = (low[axis] + share * (high[axis] - low[axis]) for axis in (0, 1))
        parts.append(_text(left + share * wide, LOW + 16, number(x), "middle"))
        parts.append(_text(left - 6, LOW - share * most + 4, number(y), "end"))
    parts += [_text(left + wide, LOW + 34, x_name, "end"), _text(4, 14, y_name)]
    for i, line in enumerate(found):
        places, kind = [at(point) for point in line.points], "abcd"[i % 4]
        if joined and len(places) > 1:
            way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path class="l{kind}" d="M{way}"/>')
        if len(places) < FEW or not joined:
            parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in places]
    named = [line for line in found if line.name]
    for i, line in enumerate(named if len(found) > 1 else []):
        y = LOW + 44 + 18 * i
        parts.append(f'<rect class="{"abcd"[i % 4]}" x="{left}" y="{y}" width="12" height="12"/>')
        parts.append(_text(left + 18, y + 10, line.name))
    return _svg(LOW + 44 + 18 * len(named), f"{y_name} over {x_name}", parts)


def _range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """The ends of an axis."""
    if not values:
        return 0.0, 1.0
    if from_zero:
        return 0.0, max(values) or 1.0
    room = 0.2 * (max(values) - min(values)) or 0.1 * abs(max(values)) or 1.0
    return min(values) - room, max(values) + room
