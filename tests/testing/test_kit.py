"""Tests of the conformance kit: the test for each planted fault detects it, and right plug-ins pass.

The first faults of each module run always, the others among the slow tests.  ``python tests/testing/test_kit.py``
prints which tests detect each fault.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import tempfile
from pathlib import Path

# as pytest does, for ``python tests/testing/test_kit.py``
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import pytest
import wrong

from minivllm.testing import SUITES
from minivllm.testing.base import BUILDING, CHECKING, REPORTING
from minivllm.testing.session import run, suite

MODULES = [importlib.import_module(f"wrong.{m.name}") for m in pkgutil.iter_modules(wrong.__path__)]
PLANTED = [(m, name) for m in MODULES for name in m.FAULTS]
RIGHT = [(m, name) for m in MODULES for name in m.RIGHT]
ALWAYS = 2  # faults of a module
TOO_WEAK = "the test itself is too weak"  # a failure with this text does not catch a fault


def outcomes(module, name, tests=()):
    how = {"device": getattr(module, "DEVICE", ""), "overrides": getattr(module, "SUITE", {}).get(name)}
    return run([(module.SEAM, f"{module.__name__}:{name}")], **how, select=" or ".join(tests), shrink=False)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(m, name, id=f"{m.SEAM}-{name}", marks=[] if i < ALWAYS else [pytest.mark.slow])
        for m in MODULES
        for i, name in enumerate(m.FAULTS)
    ],
)
def test_a_planted_fault_is_caught(module, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some faults write files into the current folder
    tests = module.FAULTS[name]
    found = [o for o in outcomes(module, name, tests) if o.status == "failed" and TOO_WEAK not in o.text]
    failed = {o.test.partition("[")[0] for o in found}
    assert set(tests) <= failed, f"{name} passes {sorted(set(tests) - failed)}"


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), RIGHT, ids=[f"{m.SEAM}-{name}" for m, name in RIGHT])
def test_what_is_right_passes(module, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong_ones = [(o.test, o.text) for o in outcomes(module, name) if o.status == "failed"]
    assert not wrong_ones


def test_at_least_24_faults_are_planted_over_all_seams():
    assert len(PLANTED) >= 24
    assert {m.SEAM for m in MODULES} == set(SUITES)


STOPPERS = {
    "broken.NewerContract": ("test_the_spec_names_an_implementation_of_the_seam", "contract is (1, 2)"),
    "broken.OlderContract": ("test_the_spec_names_an_implementation_of_the_seam", "contract is (1, 2)"),
    "broken.OtherBase": ("test_the_spec_names_an_implementation_of_the_seam", "cannot be used"),
    "broken.Raises": ("test_what_is_chosen_goes_through_json_and_is_built_from_it", "no instance can be made"),
}


@pytest.mark.parametrize("name", STOPPERS)
def test_a_failure_that_makes_the_rest_meaningless_is_told_once(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    test, words = STOPPERS[name]
    found = run([("evictor", name.replace(".", ":"))], shrink=False)
    assert [o.test for o in found if o.status == "failed"] == [test]
    assert len(found) > 20
    rest = [o for o in found if o.text.startswith("not run: ")]
    assert all(o.status == "skipped" and words in o.text for o in rest)
    run_anyway = {*REPORTING, BUILDING, CHECKING} if name == "broken.Raises" else set(REPORTING)
    assert {o.test for o in found} - {o.test for o in rest} == run_anyway


BROKEN = """
from minivllm.plugin import Evictor, Spec
from minivllm.plugins.evictor.lru import Lru

class NewerContract(Lru):
    spec = Spec("broken:NewerContract", (1, 99), "for a test")

class OlderContract(Lru):
    spec = Spec("broken:OlderContract", (0, 9), "for a test")

class Impl:
    pass

class OtherBase(Lru):
    spec = Spec("broken:Impl", (1, 0), "for a test")

class Raises(Lru):
    spec = Spec("broken:Raises", (1, 0), "for a test")
    def __init__(self, options, ctx):
        raise KeyError("nowhere")
"""


@pytest.mark.parametrize("seam", SUITES)
def test_every_test_of_a_suite_says_since_when_and_what(seam):
    for name in dir(suite(seam)):
        if name.startswith("test_"):
            assert hasattr(getattr(suite(seam), name), "since"), f"{seam}: {name} lacks @since"


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())  # some faults write files into the current folder
    for module, name in PLANTED:
        caught = [o.test for o in outcomes(module, name) if o.status == "failed"]
        print(f"{module.SEAM:10} {name:24} {', '.join(caught) or 'NOT CAUGHT'}", flush=True)


def test_a_clock_inside_of_its_own_block_leaves_the_real_clock():
    from minivllm.core.engine import parts
    from minivllm.testing.sim import Clock

    real, clock = parts.time, Clock()
    with clock:
        with clock:
            assert parts.monotonic() == clock.now
        assert parts.monotonic() == clock.now
    assert parts.time is real
