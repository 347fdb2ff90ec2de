"""The charts of a report by matplotlib, for a paper or a slide: one PNG or SVG with all of them.

matplotlib is the extra ``plot`` and is imported where a figure is drawn, with its Agg canvas: no display is needed.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

from minivllm.errors import ConfigError

from .charts import BarChart, Chart, LineChart, StackChart, TimelineChart, short, span_of

COLOURS = ("#2f6fb3", "#c2571a", "#2e8b57", "#8a4fa3", "#b0851f", "#c2417c")  # as the HTML page has them by daylight
WIDE, HIGH = 6.4, 3.2  # inches of a chart with lines
ROW, SPAN = 0.26, 0.11  # inches of a bar, and of a request
DPI = 160
DODGE = 3.0  # points between the whiskers of two lines at one place
OVER = 5  # zorder of whiskers and ticks
FORMATS = ("png", "svg")


def require() -> None:
    """ConfigError where matplotlib is not there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            'PNG and SVG are drawn by matplotlib, which is not installed: pip install "minivllm[plot]"; or want .html'
        )


def draw(found: Sequence[tuple[str, Chart]], path: str) -> None:
    """Write all charts, each under its title, to ``path``, whose ending is one of ``FORMATS``.  ConfigError if it
    cannot be written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(found))
    lines = [found[i : i + columns] for i in range(0, len(found), columns)]
    heights = [max(_height(chart) for _, chart in line) for line in lines]
    with matplotlib.rc_context({"svg.hashsalt": "minivllm", "font.size": 9, "axes.prop_cycle": _cycle()}):
        figure = Figure(figsize=(WIDE * columns, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
        for r, line in enumerate(lines):
            for c, (title, chart) in enumerate(line):
                axes = figure.add_subplot(grid[r, c])
                axes.set_title(f"{chart.title}\n{title}", fontsize=9, loc="left")
                _draw(axes, chart)
        try:
            figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.endswith(".svg") else None)
        except OSError as exc:
            raise ConfigError(f"{path}: the figure cannot be written: {exc.strerror}") from None


def _cycle() -> Any:
    from cycler import cycler

    return cycler(color=COLOURS)


def _height(chart: Chart) -> float:
    if isinstance(chart, BarChart):
        return 0.9 + ROW * len(chart.rows)
    if isinstance(chart, TimelineChart):
        return 1.2 + SPAN * len(chart.rows)
    if isinstance(chart, StackChart):
        return 1.8
    named = len([line for line in chart.lines if line.name])
    return HIGH + (0.2 * ((named + 1) // 2) if named > 1 else 0.0)


def _draw(axes: Any, chart: Chart) -> None:
    if isinstance(chart, BarChart):
        _bars(axes, chart)
    elif isinstance(chart, StackChart):
        _stack(axes, chart)
    elif isinstance(chart, TimelineChart):
        _timeline(axes, chart)
    else:
        _lines(axes, chart)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bars(axes: Any, chart: BarChart) -> None:
    rows = [row for row in chart.rows if math.isfinite(row.value)]
    places, names = range(len(rows)), [short(row.name) for row in rows]
    axes.barh(places, [row.value for row in rows], color=COLOURS[0], height=0.7)
    for y, row in zip(places, rows, strict=True):
        if row.low is not None and row.high is not None:
            _whisker(axes, (row.low, y), (row.high, y))
        if row.tick is not None:
            axes.plot([row.tick, row.tick], [y - 0.4, y + 0.4], color=COLOURS[1], linewidth=2, zorder=OVER)
    if chart.mark is not None:
        axes.axvline(chart.mark, color="grey", linestyle="--", linewidth=1)
    axes.set_yticks(list(places), names)
    least, most = span_of(rows, chart.mark)
    room = 0.04 * (most - least)  # for the caps of whiskers
    axes.set_xlim(least - room if least < 0 else 0, most + room)
    if least < 0:
        axes.axvline(0, color="grey", linewidth=0.8)
    axes.invert_yaxis()


def _whisker(
    axes: Any, a: tuple[float, float], b: tuple[float, float], colour: str = "black", shift: float = 0.0
) -> None:
    """Draw the line between two ends with a bar across each, over bars and points, and whole at the border.

    ``shift``: points to the right of an upright one, so that whiskers of several lines lie beside each other.
    """
    from matplotlib.transforms import ScaledTranslation

    upright = a[0] == b[0]
    moved = ScaledTranslation(shift / 72 if upright else 0, 0, axes.figure.dpi_scale_trans)
    style = {"color": colour, "linewidth": 1.2, "marker": "_" if upright else "|", "markersize": 7}
    xs, ys = zip(a, b, strict=True)
    axes.plot(xs, ys, zorder=OVER, clip_on=False, transform=axes.transData + moved, **style)
    axes.update_datalim([a, b])


def _stack(axes: Any, chart: StackChart) -> None:
    left = 0.0
    for row, colour in zip(chart.rows, COLOURS, strict=False):
        axes.barh([0], [row.value], left=left, color=colour, label=f"{row.name}: {row.value:.1f}")
        left += row.value
    axes.set_yticks([])
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(chart.rows))


def _lines(axes: Any, chart: LineChart) -> None:
    for i, line in enumerate(chart.lines):
        style = "-o" if chart.joined and len(line.points) < 30 else "-" if chart.joined else "o"
        axes.plot(*zip(*line.points, strict=True), style, label=line.name, markersize=4) if line.points else None
        shift = DODGE * (i - (len(chart.lines) - 1) / 2)
        for a, b in line.whiskers():
            low = a if a[1] > 0 or not chart.log else (a[0], _least(chart))
            _whisker(axes, low, b, COLOURS[i % len(COLOURS)], shift)
    if len(chart.front) > 1:
        axes.plot(*zip(*chart.front, strict=True), "--", color="grey", linewidth=1)
    if chart.log:
        axes.set_yscale("log")
        axes.autoscale_view()
    elif chart.joined:
        axes.autoscale_view()
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if _below(chart) else 0)
    if chart.joined:
        axes.set_xlim(left=0)
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    axes.grid(alpha=0.3)
    if len([line for line in chart.lines if line.name]) > 1:  # below the axes, where it hides nothing
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _below(chart: LineChart) -> bool:
    """Whether an interval goes below 0."""
    return any(a[1] < 0 for line in chart.lines for a, _ in line.whiskers())


def _least(chart: LineChart) -> float:
    """Return the lowest value that a logarithmic axis can show: a tenth of the least point above 0."""
    values = [y for line in chart.lines for _, y in line.points if y > 0]
    return min(values, default=1.0) / 10


def _timeline(axes: Any, chart: TimelineChart) -> None:
    rows = sorted(chart.rows, key=lambda row: row.start)
    places = range(len(rows))
    axes.barh(places, [r.first - r.start for r in rows], left=[r.start for r in rows], color=COLOURS[1], label="waits")
    axes.barh(places, [r.end - r.first for r in rows], left=[r.first for r in rows], color=COLOURS[0], label="answers")
    axes.set_yticks([])
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
