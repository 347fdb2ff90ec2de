"""A line of the suite, and the code that plays lines: each of its cases, then the checks after it."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Cases = Iterable[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True)
class Line:
    """``cases(ground, rng)`` gives names and functions that raise AssertionError; other seeds give other inputs.

    ``ground`` is "server" (shared, with a key and ``--admin``), "tools" (a process in which the command line runs), or
    "" (the line starts what it needs).  ``cannot`` returns the reason why it is not played on this machine, or "".
    """

    id: str
    what: str
    cases: Callable[[Any, random.Random], Cases]
    ground: str = "server"
    cannot: Callable[[], str] = lambda: ""


@dataclass
class Result:
    line: Line
    passed: int = 0
    total: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    skipped: str = ""


LINES: dict[str, Line] = {}


def line(id: str, what: str, ground: str = "server", cannot: Callable[[], str] = lambda: "") -> Any:
    """Register a generator of cases as a line."""

    def register(cases: Any) -> Any:
        assert id not in LINES, id
        LINES[id] = Line(id, what, cases, ground, cannot)
        return cases

    return register


def play(one: Line, grounds: dict[str, Any], seed: int) -> Result:
    """Run all cases with this seed.  The checks after a line count as a case of it."""
    result = Result(one)
    if why := one.cannot():
        result.skipped = why
        return result
    start, ground = time.monotonic(), grounds.get(one.ground)
    rest = getattr(ground, "at_rest", None)

    def count(name: str, run: Callable[[], Any]) -> None:
        result.total += 1
        try:
            run()
            if rest is not None:
                rest()
            result.passed += 1
        except Exception as e:
            at = traceback.extract_tb(e.__traceback__)[-1]
            where = f"{at.filename.rpartition('/')[2]}:{at.lineno}"
            result.failures.append(f"{one.id} seed {seed}, {name}: {type(e).__name__} at {where}: {str(e)[:600]}")

    try:
        for name, run in one.cases(ground, random.Random(f"{one.id} {seed}")):
            count(name, run)
    except Exception as e:
        count("its cases", lambda e=e: (_ for _ in ()).throw(e))
    if hasattr(ground, "settled"):
        count("what is left", ground.settled)
    result.seconds = time.monotonic() - start
    return result
