"""``minivllm report``: show the results of measurements as an HTML page, a PNG or an SVG.

Parsing it imports no large package.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError

PAGES = ("html", "htm")


def add_commands(command: Any) -> None:
    """Add the command ``report``; ``command(name, ...)`` makes its parser."""
    text = "Draw results of bench, ablate, compare, replay and simulate as one self-contained HTML file, PNG or SVG."
    sub = command("report", "cli.report:report", text)
    sub.add_argument("result", nargs="+", metavar="RESULT.JSON", help="a file that --output-json wrote")
    text = "the file to write: .html; or .png or .svg, which need matplotlib (the extra plot)"
    sub.add_argument("-o", "--output", required=True, metavar="FILE", help=text)


def report(args: argparse.Namespace) -> int:
    """Run ``minivllm report`` and return its exit code.  ConfigError for another ending than .html, .png or .svg, or
    for a file that is not a whole result."""
    from minivllm.lab.bench import plot, repeats
    from minivllm.lab.bench import report as reports

    ending = Path(args.output).suffix.lower().removeprefix(".")
    if ending not in (*PAGES, *plot.FORMATS):
        raise ConfigError(f"{args.output}: expected a file that ends in .html, .png or .svg")
    results = [(path, repeats.read(path)) for path in args.result]
    for path, result in results:
        try:
            reports.section(path, result)
        except (LookupError, TypeError, AttributeError, ValueError) as exc:
            raise ConfigError(f"{path}: not a whole result, edited by hand? {type(exc).__name__}: {exc}") from None
    if ending in plot.FORMATS:
        return draw([chart for path, result in results for chart in reports.charts_of(path, result)], args.output)
    files.check_output(args.output)
    files.write_text(args.output, reports.page(results))
    print(f"{len(results)} results in {args.output}")
    return 0


def draw(charts: list[Any], path: str) -> int:
    """Draw charts into a file with matplotlib, and return the exit code.

    ConfigError without matplotlib, or without charts.
    """
    from minivllm.lab.bench import plot

    plot.require()
    if not charts:
        raise ConfigError(f"{path}: these results have figures and no charts; use a file that ends in .html")
    files.check_output(path)
    plot.draw(charts, path)
    print(f"{len(charts)} charts in {path}")
    return 0
