"""Commands about recorded runs: ``minivllm diff``, the flag ``--record``, and the repetition of a recorded run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli.common import add_switch, add_value, report
from minivllm.errors import MinivllmError, suggest

if TYPE_CHECKING:
    from minivllm.config import Loaded


# exit code of ``diff`` if the source of a plug-in is unknown, so that a difference in it would not be seen
UNKNOWN_EXIT = 6


class DifferenceError(MinivllmError):
    """The error of ``diff``: two runs differ in more than ``--only`` allows."""


def record_flag() -> argparse.ArgumentParser:
    """Return a parser with ``--record``, as an argparse parent for commands that run an engine."""
    parser = argparse.ArgumentParser(add_help=False)
    text = "write the record of this run: its plug-ins with their sources and why they were chosen, and its results"
    add_value(parser, "--record", str, "RUN.JSON", text)
    return parser


def add_commands(command: Any) -> None:
    """Add the command ``diff``; ``command(name, ...)`` makes its parser."""
    text = "Print the differences between two recorded runs; the first line is a summary."
    sub = command("diff", "cli.record:diff", text)
    sub.add_argument("a", metavar="A.JSON", help="a record of a run")
    sub.add_argument("b", metavar="B.JSON", help="another record")
    text = "fail (exit code 1) if anything else differs; with 'nothing', if anything differs"
    sub.add_argument("--only", action="append", metavar="NAME[,NAME]", help=text)
    add_switch(sub, "--json", "print JSON")


def diff(args: argparse.Namespace) -> int:
    """Run ``minivllm diff`` and return its exit code.

    DifferenceError if the runs differ in more than ``--only`` allows.
    """
    from minivllm.frontend.record import bill
    from minivllm.frontend.record.diff import compare
    from minivllm.frontend.record.diff import report as difference_text

    a = bill.read(args.a)
    b = bill.read(args.b)
    found = compare(a, b)
    if args.json:
        print(json.dumps({**found.as_dict(), "fingerprints": [a["fingerprint"], b["fingerprint"]]}, indent=1))
    else:
        print(difference_text(found, _title(args.a, a), _title(args.b, b)))
    allowed: set[str] = set()
    if args.only is not None:
        names = ",".join(args.only).split(",")
        allowed = {name.strip() for name in names} - {"nothing"}
        _check_only(found.subjects, allowed)
    return UNKNOWN_EXIT if set(found.unknown) - allowed else 0


def _check_only(subjects: Sequence[str], allowed: set[str]) -> None:
    """Raise DifferenceError if two runs differ in a subject that is not in ``allowed``.

    ``subjects`` are the differing parts.  Allowed names that do not differ are reported.
    """
    same = sorted(allowed - set(subjects))
    others = [subject for subject in subjects if subject not in allowed]
    if others:
        hints = [hint for name in same if (hint := suggest(name, others))]
        near = f".{hints[0]}" if hints else ""
        only = ", ".join(sorted(allowed)) or "nothing"
        raise DifferenceError(f"more than {only} differs: {', '.join(others)}{near}")
    if same:
        report(f"--only {','.join(same)}: does not differ")


def _title(path: str, record: Mapping[str, Any]) -> str:
    """Return the path, the date and the start of the fingerprint of a recorded run, as a title."""
    return f"{path}   {record['created']}   fingerprint {record['fingerprint'][:12]}"


def read_record(path: str) -> dict[str, Any] | None:
    """Return the record of a run, read from a file; None if the file is an experiment for `minivllm run`."""
    from minivllm.frontend.record import bill

    return bill.read(path) if path.lower().endswith(".json") and bill.is_record(path) else None


def check_recorded(record: Mapping[str, Any], loaded: Loaded, args: argparse.Namespace) -> None:
    """Compare a recorded run with the run that would start now, before a model is loaded.

    Notes are printed to standard error.  ConfigError for a difference that the user did not choose, unless ``--force``
    is used.
    """
    from minivllm.device.hardware import prepare_environment

    prepare_environment()
    from minivllm.config.resolve import resolve
    from minivllm.frontend.record import bill, replay
    from minivllm.registry import Catalog

    resolved = resolve(loaded.engine, Catalog.discover(), loaded.origins)
    for note in replay.check(record, bill.make(resolved, loaded), args.file, args.force):
        report(note)


def print_tokens(record: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """Print whether a repeated run ``now`` generated the tokens of its record."""
    from minivllm.frontend.record.diff import compare

    report(f"compared with {path}: {compare(record, now).tokens_text}")
