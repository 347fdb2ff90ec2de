"""Which tests take long, as it was measured: ``conftest.py`` marks those of ``slow.txt`` as ``slow``.

    pytest -n 2 --dist loadfile --junitxml=times.xml && python tests/slow.py times.xml

A line of ``slow.txt`` is the seconds of a test and its id.  A test is in it from ``LIMIT`` seconds on; but of one with
parameters the quickest case is left out, if that takes no more than ``MOST`` seconds, so that each function of tests
is run by who runs the plain suite.  What a run has not measured, since it was left out, keeps its seconds.  A test that
is slow by what it does, such as to compile kernels, is marked where it stands.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
LISTED = HERE / "slow.txt"
LIMIT, MOST = 0.8, 2.0


def listed() -> dict[str, float]:
    """Id -> seconds."""
    lines = LISTED.read_text(encoding="utf-8").splitlines()
    return {name: float(seconds) for seconds, _, name in (line.partition(" ") for line in lines)}


def measured(path: str) -> dict[str, float]:
    """Those of a file as ``--junitxml`` writes it; what was skipped is not among them."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is None:
            found[_id(case.get("classname", ""), case.get("name", ""))] = float(case.get("time", "0"))
    return found


def _id(module: str, name: str) -> str:
    """ "tests.kit.test_kit.TestClass" and "test_it[1]" -> "tests/testing/test_kit.py::TestClass::test_it[1]"."""
    parts, classes = module.split("."), []
    while parts and not (HERE.parent / Path(*parts)).with_suffix(".py").exists():
        classes.insert(0, parts.pop())
    return "::".join(["/".join(parts) + ".py", *classes, name])


def chosen(seconds: dict[str, float]) -> dict[str, float]:
    """Those that are slow."""
    cases = defaultdict(list)
    for name in seconds:
        cases[name.partition("[")[0]].append(name)
    kept = {min(names, key=seconds.__getitem__) for names in cases.values()}
    return {name: s for name, s in seconds.items() if s >= LIMIT and (name not in kept or s > MOST)}


if __name__ == "__main__":
    there = listed() if LISTED.exists() else {}
    for path in sys.argv[1:]:
        there.update(measured(path))
    slow = chosen(there)
    LISTED.write_text("".join(f"{slow[name]:.1f} {name}\n" for name in sorted(slow)), encoding="utf-8")
    others = sum(there.values()) - sum(slow.values())
    print(f"{len(slow)} slow tests, {sum(slow.values()):.0f} s; {others:.0f} s of others")
