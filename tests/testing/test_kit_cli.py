"""``python -m minivllm.testing`` and an author's settings: known failures, contract versions, seeds, a test file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from minivllm.errors import PluginError
from minivllm.testing import EvictorConformance
from minivllm.testing.base import Seen
from minivllm.testing.cli import _count, main
from minivllm.testing.session import Outcome, run, seams_of
from minivllm.testing.verdict import CONFORMS, FAILS, HARDLY, PARTLY, PASSES, UNSEEN, exit_status, summary, verdict

WRONG = "wrong.evictors:ParentsFirst"
HELD = "test_a_key_that_is_held_again_is_not_given_up"


def test_a_right_plugin_passes_with_exit_status_0(capsys):
    assert main(["lru", "-k", "victims or spec"]) == 0
    out = capsys.readouterr().out
    assert "evictor minivllm/lru" in out and "passed" in out and "FAIL" not in out
    assert out.rstrip().endswith("lru passes what -k selects")


def test_without_pytest_the_command_says_what_to_install():
    code = "import sys; sys.modules['pytest'] = None; from minivllm.testing.cli import main; sys.exit(main(['lru']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and 'pip install "minivllm[test]"' in done.stderr


def test_a_failure_shows_rule_values_and_place_and_the_report_has_every_outcome(capsys, tmp_path):
    assert main([WRONG, "-k", "held_again or share_no_state", "--json", str(tmp_path / "r.json")]) == 1
    out = capsys.readouterr().out
    assert f"FAIL  {HELD}" in out
    text = " ".join(out.split())
    rule = " ".join(getattr(EvictorConformance, HELD).__doc__.split())
    assert f"rule {rule} victims(8) returned" in text
    assert "expected the three keys that are not held" in text
    assert "minivllm/testing/evictor.py:" in out and "does not conform" in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert {o["test"]: o["status"] for o in report["outcomes"]} == {
        HELD: "failed",
        "test_two_instances_share_no_state": "passed",
    }


@pytest.mark.slow
def test_several_processes_give_the_outcomes_of_one(capsys, tmp_path):
    reported = {}
    for n in ("1", "3"):
        file = tmp_path / f"{n}.json"
        assert main([WRONG, "lru", "-k", "held_again or share_no_state", "--processes", n, "--json", str(file)]) == 1
        outcomes = json.loads(file.read_text())["outcomes"]
        reported[n] = sorted((o["plugin"], o["test"], o["status"], o["text"][:40]) for o in outcomes)
    assert reported["1"] == reported["3"] and [status for _, _, status, _ in reported["1"]].count("failed") == 1
    out = capsys.readouterr().out
    assert out.count(f"does not conform: {WRONG}") == 2 and "FAIL  " in out
    assert main(["lru", "--processes", "0"]) == 2


@pytest.mark.slow
def test_a_test_that_ends_its_process_has_failed_and_the_others_have_not(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ends_its_process.py").write_text(
        "import os\n"
        "from minivllm.plugins.evictor.lru import Lru\n"
        "class Ends(Lru):\n"
        "    def hold(self, keys):\n"
        "        os._exit(3)\n"
    )
    args = ["ends_its_process:Ends", "--seam", "evictor", "-k", "held_again or share_no_state or options", "-v"]
    assert main([*args, "--processes", "2"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"FAIL {HELD} (0.0 s) it ended its process, with exit code 3" in out
    assert "1 FAILED" in out and "passed" in out


def test_a_known_failure_is_no_failure_and_one_that_passes_is(tmp_path, capsys):
    known = tmp_path / "known.txt"
    known.write_text(f"# mine\n{HELD}  issue 12\n")
    args = ["-k", HELD, "--known-failures", str(known), "-v"]
    assert main([WRONG, *args]) == 0
    assert "known" in capsys.readouterr().out
    assert main(["lru", *args]) == 1
    assert "passes now: remove it from the list" in capsys.readouterr().out


def test_a_known_failure_that_names_no_test_is_an_error(capsys, tmp_path):
    known = tmp_path / "known.txt"
    known.write_text("test_no_such_thing  because\n")
    assert main(["lru", "-k", "known_failures", "--known-failures", str(known)]) == 1
    assert "test_no_such_thing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "expected either the names of plug-ins or --builtins"),
        (["lru", "--builtins"], "expected either the names of plug-ins or --builtins"),
        (["nothere"], "no plug-in of any seam is called 'nothere'"),
        (["no.such:Module"], "could not be imported: ModuleNotFoundError"),
        (["wrong.evictors:Nothing"], "could not be imported: AttributeError"),
        (["lru", "-k", "no_such_test"], "no test matches"),
        (["lru", "--known-failures", "/no/such/file"], "no such file"),
        (["lru", "--seam", "sampler"], "No sampler is called 'lru'"),
    ],
)
def test_what_cannot_be_done_is_said_with_exit_status_2(args, text, capsys):
    assert main(args) == 2
    assert text in capsys.readouterr().err


def test_a_known_failures_line_without_a_reason_is_refused(tmp_path, capsys):
    (tmp_path / "known.txt").write_text("test_x\n")
    assert main(["lru", "--known-failures", str(tmp_path / "known.txt")]) == 2
    assert "known.txt:1: test_x has no reason" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_examples_are_drawn_every_time_and_others_with_a_seed():
    def victims(seed):
        one = run([("evictor", WRONG)], select="test_victims", seed=seed, shrink=False)
        return re.sub("0x[0-9a-f]+", "", one[0].text)

    assert victims(None) == victims(None)
    assert victims(1) == victims(1)
    assert len({victims(None), victims(1), victims(2)}) > 1


def test_a_test_newer_than_the_plugins_contract_is_skipped(monkeypatch):
    import minivllm.testing.evictor as module

    monkeypatch.setattr(getattr(module.EvictorConformance, HELD), "since", (1, 7))
    (one,) = run([("evictor", WRONG)], select=HELD)
    assert one.status == "skipped" and "since 1.7, the spec is for 1.0" in one.text


def test_a_property_that_never_met_its_hard_case_fails():
    seen = Seen()
    seen["preempted"] += 2
    seen.require(preempted=2)
    with pytest.raises(AssertionError, match=r"the test itself is too weak: met {'preempted': 2}"):
        seen.require(preempted=3)


@pytest.mark.parametrize("often", [True, False])
def test_examples_are_drawn_again_until_the_hard_cases_were_met(often):
    """The limits of a spec may make a case rare; that is no fault of the plug-in."""
    seen, suite, turns = Seen(), EvictorConformance(), []

    @suite.for_all(5, st.integers(0, 1 << 40))
    def _(number):
        turns.append(number)
        seen["hard"] += often

    first = list(turns)
    if often:
        suite.meet(seen, hard=11)
    else:
        with pytest.raises(AssertionError, match=r"too weak: met {'hard': 0}"):
            suite.meet(seen, hard=11)
    assert len(turns) == (15 if often else 20) and turns[5:10] != first


STRATEGIES = """
from minivllm.plugin import Branch, DecodingStrategy, Param, RequestError, Spec

class Switched(DecodingStrategy):
    spec = Spec(
        impl="switched_{kind}:Switched",
        api=(1, 4),
        summary="serves requests that turn it on",
        params=(Param("switched", {kind}, {default}, summary="turns it on"),),
    )
    reads = spec.reads

    def takes(self, params):
        return bool(params.switched)

    def start(self, params):
        if not self.takes(params):
            raise RequestError("switched: expected a true value", "switched")
        return [Branch(i) for i in range(params.n)]

    def result(self, params, ends):
        return [e.sample for e in ends]
"""


@pytest.mark.parametrize(("kind", "default", "found"), [("bool", False, PASSES), ("dict", None, HARDLY)])
def test_a_strategy_that_a_parameter_of_its_own_turns_on(kind, default, found, tmp_path, monkeypatch):
    """The kit turns a switch on.  A strategy whose values it does not know is called untested, not wrong."""
    (tmp_path / f"switched_{kind}.py").write_text(STRATEGIES.format(kind=kind, default=default))
    monkeypatch.syspath_prepend(tmp_path)
    words = "n_has_n_branches or has_gone or stay_as_they_are or refuses_by_name or takes_answers or json"
    outcomes = run([("strategy", f"switched_{kind}:Switched")], select=words)
    sys.modules.pop(f"switched_{kind}", None)
    assert verdict(outcomes, selected=True) == found, outcomes


def test_seams_are_found_by_name_and_by_base_class():
    assert seams_of("lru") == ["evictor"] and seams_of("minivllm/sdpa") == ["attention"]
    assert seams_of("minivllm.plugins.sampler.default:DefaultSampler") == ["sampler"]
    with pytest.raises(PluginError):
        run([("evictor", "nothere")])


AUTHOR = """
from minivllm.testing import EvictorConformance

class TestMine(EvictorConformance):
    plugin = "{plugin}"
"""


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "status"), [("lru", 0), (WRONG, 1)])
def test_an_authors_file_of_four_lines_runs_under_plain_pytest(tmp_path, plugin, status):
    (tmp_path / "test_mine.py").write_text(AUTHOR.format(plugin=plugin))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "held or spec", "test_mine.py"]
    path = {"PYTHONPATH": str(Path(__file__).parents[1] / "helpers"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=path)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("expected the three keys that are not held" in done.stdout) == bool(status)


RANKED = """
from minivllm.core.interfaces.params import SamplingParams
from minivllm.testing import StrategyConformance

class TestRanked(StrategyConformance):
    plugin = "wrong.strategies:ByExtra"

    def params(self, n):
        return SamplingParams(n=n, max_tokens=6, ignore_eos=True, extra={"rank": "sample"})
"""


def test_a_strategy_with_a_parameter_of_its_own_conforms_in_a_test_class(tmp_path):
    (tmp_path / "test_ranked.py").write_text(RANKED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_ranked.py"]
    path = {"PYTHONPATH": str(Path(__file__).parents[1] / "helpers"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=path)
    assert done.returncode == 0, done.stdout + done.stderr


CHECKS = """
from dataclasses import replace
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.registry import Catalog
from minivllm.registration.spec import Reason

FOUND = Catalog.discover()["attention"]
SPEC = FOUND.spec(FOUND.find("sdpa"))

def absent(request):
    return [Reason("sm: too old")] if request.facts["block"] % 8 else []

def sets(request):
    return [Reason("dim_qk: odd")] if request.facts["dim_qk"] % 2 else []

def right(request):
    return [Reason("block: odd")] if request.facts.get("block", 16) % 2 else []

class Absent(Sdpa):
    spec = replace(SPEC, impl="checking:Absent", check=absent)

class Sets(Sdpa):
    spec = replace(SPEC, impl="checking:Sets", check=sets)

class Right(Sdpa):
    spec = replace(SPEC, impl="checking:Right", check=right)
"""


@pytest.mark.parametrize(("name", "says"), [("Absent", "KeyError: 'block'"), ("Sets", "TypeError"), ("Right", "")])
def test_a_check_must_answer_for_absent_facts_and_sets(name, says, tmp_path, monkeypatch):
    (tmp_path / "checking.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(tmp_path)
    (one,) = run([("attention", f"checking:{name}")], select="check_answers")
    assert one.status == ("failed" if says else "passed") and says in one.text, one.text
    sys.modules.pop("checking", None)


def outcome(test, status, text=""):
    return Outcome("processor", "acme/x", test, status, 0.0, text)


def test_reasons_are_counted_whole_and_who_has_no_values_is_hardly_tested():
    skips = [outcome(f"test_{i}", "skipped", "no values known of x: override params()") for i in range(3)]
    rest = [outcome("test_a", "passed"), outcome("test_b", "skipped", "named by module:Class")]
    spec = [outcome("test_two_instances_share_no_state", "passed") for _ in range(9)]
    assert _count(skips + rest) == "1 passed, 4 skipped (3 no values known of x, 1 named by module:Class)"
    assert verdict(skips + rest + spec) == HARDLY
    assert verdict(skips[:2] + rest + spec) == PARTLY


def test_a_verdict_says_no_more_than_was_tested():
    passed, spec = outcome("test_a", "passed"), outcome("test_two_instances_share_no_state", "passed")
    elsewhere = [outcome("test_b", "skipped", reason) for reason in ("needs flash_attn, which", "no device here: the")]
    assert verdict([passed, spec]) == CONFORMS and verdict([passed, outcome("test_c", "failed")]) == FAILS
    assert verdict([passed, spec], selected=True) == PASSES
    assert verdict([spec, *elsewhere]) == UNSEEN and verdict([passed, outcome("test_d", "xfailed")]) == CONFORMS
    names = [("evictor", "a"), ("evictor", "b"), ("processor", "c"), ("sampler", "d"), ("attention", "e")]
    reported = dict(zip(names, (CONFORMS, CONFORMS, HARDLY, PARTLY, UNSEEN), strict=True))
    assert summary(reported) == [
        "2 plug-ins conform",
        "not tested here: e",
        "own parameters not tested: d",
        "hardly tested: c",
    ]
    assert exit_status(reported) == 3 and exit_status({**reported, names[0]: FAILS}) == 1
    alone = {names[0]: CONFORMS, names[4]: UNSEEN}
    assert exit_status(alone) == 3 and exit_status(alone, builtins=True) == 0


def test_a_plugin_whose_parameters_nobody_knows_does_not_conform(capsys, tmp_path):
    file = tmp_path / "r.json"
    assert main(["wrong.processors_own:SecondTime", "--seam", "processor", "--json", str(file)]) == 3
    out = capsys.readouterr().out
    assert "conform" not in out and out.rstrip().endswith(f"{PARTLY}: wrong.processors_own:SecondTime")
    assert json.loads(file.read_text())["verdicts"] == {"processor wrong.processors_own:SecondTime": PARTLY}


def test_a_sampler_whose_parameters_were_not_tried_is_told_where_they_are(capsys, monkeypatch):
    done = [outcome("test_a", "passed"), outcome("test_b", "skipped", "no values known of x: override params()")]
    monkeypatch.setattr("minivllm.testing.run", lambda *args, **kwargs: done)
    assert main(["default", "--seam", "sampler"]) == 3
    out = capsys.readouterr().out
    assert "its own parameters were not tested" in out and "conforms" not in out


def test_a_plugin_of_which_no_test_matches_has_no_line_and_no_verdict(capsys):
    assert main(["lru", "fcfs", "-k", "key_gives"]) == 0
    out = capsys.readouterr().out
    assert "1 passed" in out and "\n   in " not in out and out.rstrip().endswith("fcfs passes what -k selects")


def test_the_place_is_in_the_plugin_and_what_was_drawn_without_a_name_is_not_shown():
    (one,) = run([("evictor", "wrong.evictors:ChainsOnly")], select="test_victims", shrink=False)
    assert "wrong/evictors.py:" in one.where and "a block in the middle of nothing" in one.text
    assert "start_without_parents" in one.text and "Draw " not in one.text
    (one,) = run([("strategy", "wrong.strategies:SameSample")], select="has_n_branches")
    assert "testing/strategy.py:" in one.where


def test_the_kit_does_not_become_a_plugin_of_pytest():
    """An entry point would be imported by every pytest run of whoever installs minivllm."""
    from importlib.metadata import entry_points

    assert not [p for p in entry_points(group="pytest11") if "minivllm" in p.value]


def test_a_class_where_a_name_is_wanted_is_told_its_name():
    from minivllm.config import EngineConfig
    from minivllm.errors import ConfigError
    from minivllm.plugins.evictor.lru import Lru

    for value in (Lru, {"name": Lru}, {"prefer": [Lru]}):
        with pytest.raises(
            ConfigError, match=r"Lru is a class: expected a name; pass this class as 'minivllm.plugins.evictor.lru:Lru'"
        ):
            EngineConfig(evictor=value)
    with pytest.raises(ConfigError, match="hooks: Lru is a class"):
        EngineConfig(hooks=[Lru])
    with pytest.raises(
        PluginError, match=r"expected a name, dist/name or module:Class, here 'minivllm.plugins.evictor.lru:Lru'"
    ):
        run([("evictor", Lru)])


def test_bind_that_returns_a_number_is_told_what_is_wanted():
    from wrong.processors_own import OWN

    done = run(
        [("processor", "wrong.processors_own:ReturnsANumber")], select="default or beside_it or columns", overrides=OWN
    )
    failed = [o.text for o in done if o.status == "failed"]
    assert failed and all("returned 5 (int): expected a Row or None" in text for text in failed), failed


@pytest.mark.parametrize(
    ("plugin", "test", "says"),
    [
        (
            "quantizers:Truncates",
            "test_each_element_is_held_within_half_a_step",
            "overrides step if the format has others",
        ),
        (
            "quantizers_packed:LosesTheLastInput",
            "test_weights_that_the_format_has_come_back_exactly",
            "overrides grid(info)",
        ),
        ("quantizers_late:ScalesOfThreeBits", "test_what_lives_on_the_device_is_told", "may override scale_bits"),
        ("kvformats:Truncates", "test_what_is_stored_comes_back_and_nothing_else_changes", "override allowed(fmt, x)"),
        (
            "kvformats_sizes:Trips",
            "test_the_layout_says_what_is_allocated",
            "kv_heads, dims and blocks in a test class",
        ),
        pytest.param(
            "schedulers:ShortestFirst",
            "test_nobody_starves and shorter",
            "a test class may raise it",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failure_by_what_may_be_overridden_says_so(plugin, test, says):
    seam = {"q": "quantizer", "k": "kvformat", "s": "scheduler"}[plugin[0]]
    done = run([(seam, f"wrong.{plugin}")], select=test, shrink=False)
    failed = [o.text for o in done if o.status == "failed"]
    assert failed and all(says in text for text in failed), failed
