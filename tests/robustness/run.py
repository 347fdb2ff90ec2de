"""Play the lines of the suite and print passed/total of each.

    python tests/robustness/run.py [--times 10] [--only C3,F14] [--seed 1]

A round plays every line with another seed, on the same servers.  The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from robustness import api, bodies, commands, configs, models, plugins, process, routes, sockets, wire  # noqa: F401
from robustness.ground import Served
from robustness.lines import LINES, Line, Result, play
from robustness.tools import Tools

GROUNDS = {"server": Served, "plain": lambda: Served(key="", admin=False), "tools": Tools}


def select(only: str) -> list[Line]:
    """Return the lines with these ids, or whose ids begin with a single letter among them; all for ""."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    chosen = [
        one
        for one in LINES.values()
        if not words
        or any(w in (one.id, one.id.split(" ")[0]) or (w.isalpha() and len(w) == 1 and one.id[0] == w) for w in words)
    ]
    if not chosen:
        raise SystemExit(f"no such line; there are: {', '.join(LINES)}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=1, help="rounds, each with another seed")
    parser.add_argument("--only", default="", help="ids, with commas; one letter: all of that kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    args = parser.parse_args()
    lines = select(args.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes of the suite are ended then too
    grounds: dict[str, Any] = {}
    results: dict[str, Result] = {}
    start = time.monotonic()
    try:
        for round_ in range(args.times):
            began = time.monotonic()
            for one in lines:
                if one.ground in GROUNDS and one.ground not in grounds:
                    grounds[one.ground] = GROUNDS[one.ground]()
                found = play(one, grounds, args.seed + round_)
                for failure in found.failures:
                    print(f"FAILED {failure}", flush=True)
                merge(results.setdefault(one.id, Result(one)), found)
            if "server" in grounds:
                memory(grounds["server"], results)
            print(f"round {round_ + 1}: {time.monotonic() - began:.1f} s", flush=True)
    finally:
        for ground in grounds.values():
            ground.stop()
    report(results, time.monotonic() - start)
    return 1 if any(result.failures for result in results.values()) else 0


def merge(into: Result, found: Result) -> None:
    into.passed, into.total = into.passed + found.passed, into.total + found.total
    into.seconds += found.seconds
    into.failures += found.failures
    into.skipped = found.skipped


def memory(server: Served, results: dict[str, Result]) -> None:
    """Return I10 as a line of its own."""
    result = results.setdefault(
        "I10", Result(Line("I10", "memory after a round is that after the first", lambda *_: ()))
    )
    result.total += 1
    try:
        now = server.memory()
        print("  ".join(f"RSS of the {name}: {size / 2**20:.1f} MiB" for name, size in now.items()), flush=True)
        result.passed += 1
    except AssertionError as e:
        result.failures.append(str(e))
        print(f"FAILED {e}", flush=True)


def report(results: dict[str, Result], seconds: float) -> None:
    for id, result in results.items():
        if result.skipped:
            print(f"{id:10} not played  {result.line.what}: {result.skipped}")
            continue
        print(f"{id:10} {result.passed:>5}/{result.total:<5} {result.seconds:6.1f} s  {result.line.what}")
    passed, total = (sum(getattr(r, n) for r in results.values()) for n in ("passed", "total"))
    clean = sum(not r.failures and not r.skipped for r in results.values())
    print(f"{passed}/{total} cases, {clean}/{len(results)} lines without a fault, {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
