"""``minivllm report``: results as one HTML file, PNG or SVG.  Parsing it imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError

PAGES = ("html", "htm")


def add_commands(command: Any) -> None:
    """Add ``report``.  ``command`` is that of ``minivllm.cli``."""
    text = (
        "Results of bench, ablate, compare, replay, simulate as one HTML file of charts, whole in itself; or PNG, SVG."
    )
    sub = command("report", "cli.report:report", text)
    sub.add_argument("result", nargs="+", metavar="RESULT.JSON", help="what --output-json wrote")
    text = "where it goes: .html, or .png or .svg, which matplotlib draws (the extra plot)"
    sub.add_argument("-o", "--output", required=True, metavar="FILE", help=text)


def report(args: argparse.Namespace) -> int:
    from minivllm.lab.bench import plot, repeats
    from minivllm.lab.bench import report as reports

    ending = Path(args.output).suffix.lower().removeprefix(".")
    if ending not in (*PAGES, *plot.FORMATS):
        raise ConfigError(f"{args.output}: want a file that ends in .html, .png or .svg")
    found = [(path, repeats.read(path)) for path in args.result]
    for path, result in found:
        try:
            reports.section(path, result)
        except (LookupError, TypeError, AttributeError, ValueError) as exc:
            raise ConfigError(f"{path}: not a whole result, edited by hand? {type(exc).__name__}: {exc}") from None
    if ending in plot.FORMATS:
        return drawn([one for name, result in found for one in reports.charts_of(name, result)], args.output)
    files.check_output(args.output)
    Path(args.output).write_text(reports.page(found), encoding="utf-8")
    print(f"{len(found)} results in {args.output}")
    return 0


def drawn(charts: list[Any], path: str) -> int:
    """By matplotlib.  ConfigError where it is not there, or where nothing is to be drawn."""
    from minivllm.lab.bench import plot

    plot.require()
    if not charts:
        raise ConfigError(f"{path}: these results have figures and no charts; want .html")
    files.check_output(path)
    plot.draw(charts, path)
    print(f"{len(charts)} charts in {path}")
    return 0
