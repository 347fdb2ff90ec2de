"""What a run of the kit says about a plug-in: that nothing failed is not that it was tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Outcome

CONFORMS, FAILS, PASSES = "conforms", "does not conform", "passes what -k selects"
HARDLY, PARTLY, UNSEEN = "hardly tested", "own parameters not tested", "not tested here"
MANY = {CONFORMS: "conform", PASSES: "pass what -k selects"}
ELSEWHERE = ("needs ", "no device here")  # and so that of one that cannot run on this machine
NO_VALUES = "no values known"  # so begins the reason of a test that had none to try
EXIT = {CONFORMS: 0, PASSES: 0, FAILS: 1, HARDLY: 3, PARTLY: 3, UNSEEN: 3}
Plugin = tuple[str, str]  # (seam, label)


def verdict(outcomes: Sequence[Outcome], selected: bool = False) -> str:
    """One of the words above, of the outcomes of one plug-in; ``selected``: of some of its tests only."""
    from .declaring import DeclaringOnRows
    from .spec import SpecConformance

    if any(o.status == "failed" for o in outcomes):
        return FAILS
    said = (SpecConformance, DeclaringOnRows)  # what is tested of a spec says nothing of what a plug-in does
    does = [o for o in outcomes if not any(hasattr(suite, o.test.partition("[")[0]) for suite in said)]
    missed = sum(_skipped(o, NO_VALUES) for o in does)
    if 2 * missed > len(does):
        return HARDLY
    if 2 * sum(_skipped(o, *ELSEWHERE) for o in does) > len(does):
        return UNSEEN
    return PARTLY if missed else PASSES if selected else CONFORMS


def _skipped(o: Outcome, *reasons: str) -> bool:
    return o.status == "skipped" and o.text.startswith(reasons)


def advice(found: str) -> str:
    """What is to be done about a verdict, below the plug-in's tests; empty where nothing is."""
    return {
        HARDLY: "hardly tested: override params() in a test class (see docs/plugins.md)",
        PARTLY: "its own parameters were not tested: the test class of its package gives values (run pytest there)",
        UNSEEN: "most of what it does was not tested here: it needs another machine or a package",
    }.get(found, "")


def summary(verdicts: Mapping[Plugin, str]) -> list[str]:
    """The last lines: each verdict with the plug-ins that have it, the good one first."""
    lines = []
    for found in (CONFORMS, PASSES, UNSEEN, PARTLY, HARDLY, FAILS):
        names = sorted({label for (_, label), v in verdicts.items() if v == found})
        if not names:
            continue
        n = sum(v == found for v in verdicts.values())
        if found in (CONFORMS, PASSES):
            lines.append(f"{names[0]} {found}" if n == 1 else f"{n} plug-ins {MANY[found]}")
        else:
            lines.append(f"{found}: {', '.join(names)}")
    return lines


def exit_status(verdicts: Mapping[Plugin, str], builtins: bool = False) -> int:
    """The status of the command; ``builtins``: of those some cannot run on any one machine."""
    found = {EXIT[v] for v in verdicts.values() if not (builtins and v == UNSEEN)}
    return 1 if 1 in found else max(found, default=0)
