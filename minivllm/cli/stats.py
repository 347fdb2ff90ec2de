"""``minivllm stats``: statistics of use that stay on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

VERBS = ("show", "on", "off", "delete")
SHOWN = 8  # models, and parts of a seam


def add_commands(command: Any) -> None:
    """Add ``stats``.  ``command`` is that of ``minivllm.cli``."""
    text = "Sums of what ran on this machine: models, parts, tokens, joules.  Off until switched on; nothing is sent."
    sub = command("stats", "cli.stats:stats", text)
    sub.add_argument("verb", nargs="?", choices=VERBS, default="show", help="default show")
    sub.add_argument("--json", action="store_true", help="print what is kept as JSON")


def stats(args: argparse.Namespace) -> int:
    from minivllm.runtime import usage

    if args.verb == "delete":
        print(f"deleted: {usage.path()}" if usage.delete() else "nothing was kept")
        return 0
    if args.verb in ("on", "off"):
        usage.switch(args.verb == "on")
    kept = usage.read()
    if args.json:
        print(json.dumps(usage.empty() if kept is None else kept, indent=1))
        return 0
    print("\n".join(_lines(kept, str(usage.path()))))
    return 0


def _lines(kept: Mapping[str, Any] | None, at: str) -> Iterator[str]:
    on = kept is not None and kept["on"]
    state = f"kept in {at}" if kept is not None else "nothing is kept"
    yield f"usage statistics: {'on' if on else 'off'}; {state}; nothing leaves this machine"
    if not on:
        yield "`minivllm stats on` counts the runs that begin from then on"
    if kept is None or not kept["totals"]:
        return
    yield from ("", f"since {kept['since']}")
    rows = [("all", kept["totals"]), *_most(kept["models"])]
    width = max(len(name) for name, _ in rows)
    for name, sums in rows:
        yield f"  {name:{width}}  {_told(sums)}"
    yield from ("", "parts, by tokens of answers")
    for seam, found in sorted(kept["parts"].items()):
        names = ", ".join(f"{name} {sums['output_tokens']:,.0f}" for name, sums in _most(found))
        yield f"  {seam:10}  {names}"


def _most(found: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    order = sorted(found.items(), key=lambda item: -item[1].get("output_tokens", 0))
    return order[:SHOWN]


def _told(sums: Mapping[str, float]) -> str:
    joules = sums.get("joules", 0)
    spent = f", {joules:,.0f} J" if joules else ""
    return (
        f"{sums['runs']:,.0f} runs, {sums['requests']:,.0f} requests, {sums['prompt_tokens']:,.0f} prompt and "
        f"{sums['output_tokens']:,.0f} output tokens, {sums['seconds'] / 3600:,.2f} h{spent}"
    )
