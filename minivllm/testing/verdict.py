"""The verdict of the kit on a plug-in.  A plug-in without failures conforms only if most of its tests ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Outcome

CONFORMS, FAILS, PASSES = "conforms", "does not conform", "passes what -k selects"
HARDLY, PARTLY, UNSEEN = "hardly tested", "own parameters not tested", "not tested here"
MANY = {CONFORMS: "conform", PASSES: "pass what -k selects"}
# starts of the reason of a test that is skipped because it cannot run on this machine
ELSEWHERE = ("needs ", "no device here")
# start of the reason of a test that is skipped because the kit has no values for a parameter
NO_VALUES = "no values known"
EXIT = {CONFORMS: 0, PASSES: 0, FAILS: 1, HARDLY: 3, PARTLY: 3, UNSEEN: 3}
Plugin = tuple[str, str]  # (seam, label)


def verdict(outcomes: Sequence[Outcome], selected: bool = False) -> str:
    """Return the verdict on a plug-in, one of the constants above, from the outcomes of its tests.

    ``selected`` means that only some of its tests ran.  Tests of the spec do not count as tests of the implementation.
    """
    from .declaring import DeclaringOnRows
    from .spec import SpecConformance

    if any(o.status == "failed" for o in outcomes):
        return FAILS
    of_spec = (SpecConformance, DeclaringOnRows)
    counted = []
    for o in outcomes:
        if not any(hasattr(suite, o.test.partition("[")[0]) for suite in of_spec):
            counted.append(o)
    without_values = sum(_skipped(o, NO_VALUES) for o in counted)
    if 2 * without_values > len(counted):
        return HARDLY
    if 2 * sum(_skipped(o, *ELSEWHERE) for o in counted) > len(counted):
        return UNSEEN
    if without_values:
        return PARTLY
    return PASSES if selected else CONFORMS


def _skipped(o: Outcome, *reasons: str) -> bool:
    return o.status == "skipped" and o.text.startswith(reasons)


def advice(found: str) -> str:
    """Return advice for the author about a verdict, to print below the plug-in's tests; empty if there is none."""
    return {
        HARDLY: "hardly tested: override params() in a test class (see docs/plugins.md)",
        PARTLY: "its own parameters were not tested: the test class of its package has values (run pytest there)",
        UNSEEN: "most tests did not run here: they need another machine or a package",
    }.get(found, "")


def summary(verdicts: Mapping[Plugin, str]) -> list[str]:
    """Return the last lines of a run: each verdict with the plug-ins that have it, good verdicts first."""
    lines = []
    for found in (CONFORMS, PASSES, UNSEEN, PARTLY, HARDLY, FAILS):
        labels = [label for (_, label), v in verdicts.items() if v == found]
        if not labels:
            continue
        if found not in MANY:
            lines.append(f"{found}: {', '.join(sorted(set(labels)))}")
        elif len(labels) == 1:
            lines.append(f"{labels[0]} {found}")
        else:
            lines.append(f"{len(labels)} plug-ins {MANY[found]}")
    return lines


def exit_status(verdicts: Mapping[Plugin, str], builtins: bool = False) -> int:
    """Return the exit status of the command: 0 if all conform, 1 if a test failed, 3 if too few could run.

    ``builtins`` means a run of all built-in plug-ins, some of which cannot run on any single machine; these do not
    count.
    """
    found = set()
    for v in verdicts.values():
        if not (builtins and v == UNSEEN):
            found.add(EXIT[v])
    if 1 in found:
        return 1
    return max(found, default=0)
