"""Draw the charts of a report with matplotlib into one PNG or SVG, for a paper or a slide.

matplotlib is the extra ``plot`` and is imported when a figure is drawn.  Its Agg canvas needs no display.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

from minivllm.errors import ConfigError

from .charts import BarChart, Chart, LineChart, StackChart, TimelineChart, short, span_of

COLOURS = (
    "#2f6fb3",
    "#c2571a",
    "#2e8b57",
    "#8a4fa3",
    "#b0851f",
    "#c2417c",
)  # the colors of the light theme of the HTML page
WIDE, HIGH = 6.4, 3.2  # size of a chart with lines, in inches
ROW, SPAN = 0.26, 0.11  # height of a bar, and of a request in a timeline, in inches
DPI = 160
DODGE = 3.0  # distance in points of the whiskers of two lines at the same x
OVER = 5  # zorder of whiskers and ticks, above bars and lines
FORMATS = ("png", "svg")


def require() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            'PNG and SVG are drawn by matplotlib, which is not installed: pip install "minivllm[plot]"; or write .html'
        )


def draw(found: Sequence[tuple[str, Chart]], path: str) -> None:
    """Draw (title, chart) pairs and write them to ``path``, which ends with one of ``FORMATS``.

    Raise ConfigError if the file cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    columns = min(2, len(found))
    lines = [found[i : i + columns] for i in range(0, len(found), columns)]
    heights = [max(_height(chart) for _, chart in line) for line in lines]
    settings: Any = {"svg.hashsalt": "minivllm", "font.size": 9, "axes.prop_cycle": cycler(color=COLOURS)}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDE * columns, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
        for r, line in enumerate(lines):
            for c, (title, chart) in enumerate(line):
                axes = figure.add_subplot(grid[r, c])
                axes.set_title(f"{chart.title}\n{title}", fontsize=9, loc="left")
                _draw(axes, chart)
        metadata = {"Date": None} if path.endswith(".svg") else None  # no date, so that equal charts give equal files
        try:
            figure.savefig(path, dpi=DPI, metadata=metadata)
        except OSError as exc:
            raise ConfigError(f"{path}: the figure cannot be written: {exc.strerror}") from None


def _height(chart: Chart) -> float:
    """Return the height of a chart in inches."""
    if isinstance(chart, BarChart):
        return 0.9 + ROW * len(chart.rows)
    if isinstance(chart, TimelineChart):
        return 1.2 + SPAN * len(chart.rows)
    if isinstance(chart, StackChart):
        return 1.8
    named = _named(chart)
    if named <= 1:
        return HIGH
    legend_rows = (named + 1) // 2
    return HIGH + 0.2 * legend_rows


def _named(chart: LineChart) -> int:
    """Return the number of lines with a name; a legend lists them if there are several."""
    return sum(bool(line.name) for line in chart.lines)


def _draw(axes: Any, chart: Chart) -> None:
    """Draw a chart of any kind."""
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
    """Draw horizontal bars, with whiskers, ticks and the mark of the chart."""
    rows = [row for row in chart.rows if math.isfinite(row.value)]
    places = range(len(rows))
    names = [short(row.name) for row in rows]
    values = [row.value for row in rows]
    axes.barh(places, values, color=COLOURS[0], height=0.7)
    for y, row in enumerate(rows):
        if row.low is not None and row.high is not None:
            _whisker(axes, (row.low, y), (row.high, y))
        if row.tick is not None:
            xs = [row.tick, row.tick]
            axes.plot(xs, [y - 0.4, y + 0.4], color=COLOURS[1], linewidth=2, zorder=OVER)
    if chart.mark is not None:
        axes.axvline(chart.mark, color="grey", linestyle="--", linewidth=1)
    axes.set_yticks(list(places), names)
    least, most = span_of(rows, chart.mark)
    room = 0.04 * (most - least)  # the space for the caps of whiskers
    if least < 0:
        axes.set_xlim(least - room, most + room)
        axes.axvline(0, color="grey", linewidth=0.8)
    else:
        axes.set_xlim(0, most + room)
    axes.invert_yaxis()


def _whisker(
    axes: Any, a: tuple[float, float], b: tuple[float, float], colour: str = "black", shift: float = 0.0
) -> None:
    """Draw an interval from ``a`` to ``b``, with a cap at each end.

    It is drawn above bars and points, and is not clipped at the border.  ``shift`` moves a vertical interval to the
    right, in points, so that the intervals of several lines do not overlap.
    """
    from matplotlib.transforms import ScaledTranslation

    xs, ys = zip(a, b, strict=True)
    upright = a[0] == b[0]
    inches = shift / 72 if upright else 0
    moved = ScaledTranslation(inches, 0, axes.figure.dpi_scale_trans)
    style = {"color": colour, "linewidth": 1.2, "marker": "_" if upright else "|", "markersize": 7}
    axes.plot(xs, ys, zorder=OVER, clip_on=False, transform=axes.transData + moved, **style)
    axes.update_datalim([a, b])


def _stack(axes: Any, chart: StackChart) -> None:
    """Draw one bar whose parts are the rows of the chart."""
    left = 0.0
    for row, colour in zip(chart.rows, COLOURS, strict=False):
        axes.barh([0], [row.value], left=left, color=colour, label=f"{row.name}: {row.value:.1f}")
        left += row.value
    axes.set_yticks([])
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(chart.rows))


def _lines(axes: Any, chart: LineChart) -> None:
    """Draw lines or points, with whiskers and the dashed front of the chart."""
    middle = (len(chart.lines) - 1) / 2
    for i, line in enumerate(chart.lines):
        style = "o"
        if chart.joined:
            style = "-o" if len(line.points) < 30 else "-"
        if line.points:
            xs, ys = zip(*line.points, strict=True)
            axes.plot(xs, ys, style, label=line.name, markersize=4)
        colour = COLOURS[i % len(COLOURS)]
        for (x, y), end in line.whiskers():
            if chart.log and y <= 0:
                y = _least(chart)
            _whisker(axes, (x, y), end, colour, DODGE * (i - middle))
    if len(chart.front) > 1:
        xs, ys = zip(*chart.front, strict=True)
        axes.plot(xs, ys, "--", color="grey", linewidth=1)
    if chart.log:
        axes.set_yscale("log")
        axes.autoscale_view()
    elif chart.joined:
        axes.autoscale_view()
        lowest, _ = axes.get_ylim()
        axes.set_ylim(bottom=min(0.0, lowest) if _below(chart) else 0)
    if chart.joined:
        axes.set_xlim(left=0)
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    axes.grid(alpha=0.3)
    if _named(chart) > 1:  # the legend is below the axes, so that it covers no line
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _below(chart: LineChart) -> bool:
    """Return whether an interval contains values below 0."""
    whiskers = chain(*(line.whiskers() for line in chart.lines))
    return any(y < 0 for (_, y), _ in whiskers)


def _least(chart: LineChart) -> float:
    """Return the lowest value that a logarithmic axis can show: a tenth of the least point above 0."""
    values = [y for line in chart.lines for _, y in line.points if y > 0]
    return min(values, default=1.0) / 10


def _timeline(axes: Any, chart: TimelineChart) -> None:
    """Draw a bar for each request, from its start to its end, in two colours that meet at its first token."""
    rows = sorted(chart.rows, key=lambda row: row.start)
    places = range(len(rows))
    waits = [row.first - row.start for row in rows]
    answers = [row.end - row.first for row in rows]
    axes.barh(places, waits, left=[row.start for row in rows], color=COLOURS[1], label="waits")
    axes.barh(places, answers, left=[row.first for row in rows], color=COLOURS[0], label="answers")
    axes.set_yticks([])
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
