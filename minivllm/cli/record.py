"""The part of the command line that is about records of runs: ``diff``, ``--record``, and starting a run again."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, MinivllmError, suggest

if TYPE_CHECKING:
    from minivllm.config import Loaded


class DifferenceError(MinivllmError):
    """Two runs differ in more than was allowed."""


def record_flag() -> argparse.ArgumentParser:
    """The parent of the commands that run an engine."""
    parser = argparse.ArgumentParser(add_help=False)
    text = "write the bill of materials of this run, with its results: what was wired, from which source, and why"
    parser.add_argument("--record", metavar="RUN.JSON", help=text)
    return parser


UNKNOWN_EXIT = 6  # of diff, where a part's source is not known: it may differ, and nobody sees it


def add_commands(command: Any) -> None:
    """Add ``diff``.  ``command`` is that of ``minivllm.cli``."""
    sub = command("diff", "cli.record:diff", "Say what differs between two recorded runs, first of all in one line.")
    sub.add_argument("a", metavar="A.JSON", help="a record of a run")
    sub.add_argument("b", metavar="B.JSON", help="another one")
    text = "fail (exit code 1) if anything else differs; 'nothing' if nothing may"
    sub.add_argument("--only", action="append", default=None, metavar="NAME[,NAME]", help=text)
    sub.add_argument("--json", action="store_true", help="print JSON")


def diff(args: argparse.Namespace) -> int:
    from minivllm.frontend.record import bill
    from minivllm.frontend.record.diff import compare, report

    a, b = bill.read(args.a), bill.read(args.b)
    found = compare(a, b)
    if args.json:
        print(json.dumps({**found.as_dict(), "fingerprints": [a["fingerprint"], b["fingerprint"]]}, indent=1))
    else:
        print(report(found, _title(args.a, a), _title(args.b, b)))
    allowed: set[str] = set()
    if args.only is not None:
        allowed = {name.strip() for text in args.only for name in text.split(",")} - {"nothing"}
        if others := [subject for subject in found.subjects if subject not in allowed]:
            near = next((hint for name in sorted(allowed - set(found.subjects)) if (hint := suggest(name, others))), "")
            only = ", ".join(sorted(allowed)) or "nothing"
            raise DifferenceError(f"more than {only} differs: {', '.join(others)}{near and '.' + near}")
        if same := sorted(allowed - set(found.subjects)):
            print(f"minivllm: --only {','.join(same)}: does not differ", file=sys.stderr)
    return UNKNOWN_EXIT if set(found.unknown) - allowed else 0


def _title(path: str, record: Mapping[str, Any]) -> str:
    return f"{path}   {record['created']}   fingerprint {record['fingerprint'][:12]}"


def record_path(args: argparse.Namespace, loaded: Loaded) -> str | None:
    """Where the record of this run goes; ConfigError, before the work, if it cannot go there."""
    from minivllm.frontend.record.bill import check_writable

    runs = hasattr(args, "file")  # the [run] table is about `minivllm run`
    path = getattr(args, "record", None) or (loaded.run.record if runs else None)
    if path is None:
        return None
    check_writable(path)
    if runs and os.path.abspath(args.file) == os.path.abspath(path):
        raise ConfigError(f"--record {path}: is the record that is started again; give the new one another name")
    return path


def read_record(path: str) -> dict[str, Any] | None:
    """The record in a file that is to be run, None if it is an experiment file."""
    from minivllm.frontend.record import bill

    return bill.read(path) if path.lower().endswith(".json") and bill.is_record(path) else None


def check_recorded(record: Mapping[str, Any], loaded: Loaded, args: argparse.Namespace) -> None:
    """Before a model is loaded: would this be the recorded run?  ConfigError says what is not."""
    from minivllm.device.hardware import prepare_environment

    prepare_environment()
    from minivllm.config.resolve import resolve
    from minivllm.frontend.record import bill, replay
    from minivllm.registry import Catalog

    resolved = resolve(loaded.engine, Catalog.discover(), loaded.origins)
    for note in replay.check(record, bill.make(resolved, loaded), args.file, args.force):
        print(f"minivllm: {note}", file=sys.stderr)


def tell_tokens(record: Mapping[str, Any], now: Mapping[str, Any], path: str) -> None:
    """After a run that was started again: are the tokens those of the record?"""
    from minivllm.frontend.record.diff import compare

    print(f"minivllm: compared with {path}: {compare(record, now).tokens_text}", file=sys.stderr)
