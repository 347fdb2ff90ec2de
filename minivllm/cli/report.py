"""``minivllm report``: results as one HTML file.  Parsing it imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError


def add_commands(command: Any) -> None:
    """Add ``report``.  ``command`` is that of ``minivllm.cli``."""
    text = "Results of bench, ablate and compare as one HTML file with charts, which needs nothing beside it."
    sub = command("report", "cli.report:report", text)
    sub.add_argument("result", nargs="+", metavar="RESULT.JSON", help="what --output-json wrote")
    sub.add_argument("-o", "--output", required=True, metavar="FILE.HTML", help="where it goes")


def report(args: argparse.Namespace) -> int:
    from minivllm.bench import repeats
    from minivllm.bench import report as reports

    found = [(path, repeats.read(path)) for path in args.result]
    for path, result in found:
        try:
            reports.section(path, result)
        except (LookupError, TypeError, AttributeError, ValueError) as exc:
            raise ConfigError(f"{path}: not a whole result, edited by hand? {type(exc).__name__}: {exc}") from None
    files.check_output(args.output)
    Path(args.output).write_text(reports.page(found), encoding="utf-8")
    print(f"{len(found)} results in {args.output}")
    return 0
