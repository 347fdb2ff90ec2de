"""``minivllm stats``: show the usage statistics, which stay on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from minivllm.cli.common import add_switch

VERBS = ("show", "on", "off", "delete")
SHOWN = 8  # number of models, and of plug-ins of a seam (kind of plug-in), that are printed


def add_commands(command: Any) -> None:
    """Add the command ``stats``; ``command(name, ...)`` makes its parser."""
    text = "Print sums over the runs on this machine: models, plug-ins, tokens, joules.  Off by default, never sent."
    sub = command("stats", "cli.stats:stats", text)
    sub.add_argument("verb", nargs="?", choices=VERBS, default="show", help="default show")
    add_switch(sub, "--json", "print the statistics as JSON")


def stats(args: argparse.Namespace) -> int:
    """Run ``minivllm stats``, which prints the usage statistics, switches them on or off, or deletes them; return its
    exit code."""
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


def _lines(kept: Mapping[str, Any] | None, path: str) -> Iterator[str]:
    """Yield the printed lines of the statistics.

    ``kept`` is the content of the file at ``path``, None if there is no file.
    """
    on = kept is not None and kept["on"]
    state = f"kept in {path}" if kept is not None else "nothing is kept"
    yield f"usage statistics: {'on' if on else 'off'}; {state}; nothing leaves this machine"
    if not on:
        yield "`minivllm stats on` counts the runs that begin from then on"
    if kept is None or not kept["totals"]:
        return
    yield from ("", f"since {kept['since']}")
    rows = [("all", kept["totals"]), *_most_used(kept["models"])]
    width = max(len(name) for name, _ in rows)
    for name, sums in rows:
        yield f"  {name:{width}}  {_sums_text(sums)}"
    yield from ("", "parts, by tokens of answers")
    for seam, plugins in sorted(kept["parts"].items()):
        names = ", ".join(f"{name} {sums['output_tokens']:,.0f}" for name, sums in _most_used(plugins))
        yield f"  {seam:10}  {names}"


def _most_used(sums_of: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    """Return the ``SHOWN`` names with the most output tokens, the largest first, each with its sums."""
    order = sorted(sums_of.items(), key=lambda item: -item[1].get("output_tokens", 0))
    return order[:SHOWN]


def _sums_text(sums: Mapping[str, float]) -> str:
    """Return sums of runs as text: counts, tokens, hours, and joules if they were measured."""
    joules = sums.get("joules", 0)
    energy = f", {joules:,.0f} J" if joules else ""
    return (
        f"{sums['runs']:,.0f} runs, {sums['requests']:,.0f} requests, {sums['prompt_tokens']:,.0f} prompt and "
        f"{sums['output_tokens']:,.0f} output tokens, {sums['seconds'] / 3600:,.2f} h{energy}"
    )
