"""Select the slow tests by measured times.  ``conftest.py`` marks the tests in ``slow.txt`` as ``slow``.

    pytest -n 2 --dist loadfile --junitxml=times.xml && python tests/slow.py times.xml

A line of ``slow.txt`` has the seconds and the id of a test.  Tests of ``LIMIT`` seconds and more are listed.  Of a test
with parameters the quickest case is left out if it takes at most ``MOST`` seconds, so that the plain suite runs each
test function.  Tests that a run has skipped keep their seconds.  A test that is slow by its nature, for example because
it compiles kernels, has the mark in its file.
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
    """Return the seconds of the listed tests, by id."""
    lines = LISTED.read_text(encoding="utf-8").splitlines()
    return {name: float(seconds) for seconds, _, name in (line.partition(" ") for line in lines)}


def measured(path: str) -> dict[str, float]:
    """Return the seconds of the tests in a file of ``--junitxml``, by id.  Skipped tests are left out."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is None:
            found[_id(case.get("classname", ""), case.get("name", ""))] = float(case.get("time", "0"))
    return found


def _id(module: str, name: str) -> str:
    """Return the id of a test, such as ``tests/testing/test_kit.py::TestClass::test_it[1]``.

    ``module`` is ``tests.testing.test_kit.TestClass`` and ``name`` is ``test_it[1]``."""
    parts, classes = module.split("."), []
    while parts and not (HERE.parent / Path(*parts)).with_suffix(".py").exists():
        classes.insert(0, parts.pop())
    return "::".join(["/".join(parts) + ".py", *classes, name])


def chosen(seconds: dict[str, float]) -> dict[str, float]:
    """Return the tests that ``slow.txt`` should list."""
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
