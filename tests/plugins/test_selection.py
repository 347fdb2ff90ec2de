"""The choice of plug-ins: limits, tiers, preferences, options, and the exact text of every refusal."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_helpers import discover, install, point, spec_text, write_package

from minivllm.errors import PluginError
from minivllm.registration.spec import allows
from minivllm.registry import (
    ANY,
    KINDS,
    AtLeast,
    AtMost,
    Catalog,
    Entry,
    MultipleOf,
    Needs,
    PluginQuery,
    Range,
    Reason,
    Registry,
    Spec,
)

# ---------------------------------------------------------------- limits

package = pytest.fixture(write_package)


FLASH = Spec(
    "a:B", (1, 0), "x",
    limits={
        "dtype": {"float16", "bfloat16"}, "block": MultipleOf(16), "sm": AtLeast(90), "dim": Range(64, 128),
        "q": AtMost(8),
    },
    features=frozenset({"window"}),
    needs=(Needs("no_such_module", install='pip install "minivllm[fi]"'), Needs("numpy", "999")),
)  # fmt: skip


def test_every_reason_is_given_at_once():
    import numpy

    facts = {"dtype": "float32", "block": 24, "sm": 80, "dim": frozenset({64, 256}), "q": 16, "new": 1}
    reasons = FLASH.refuse(PluginQuery(facts, frozenset({"window", "sinks"})), KINDS["attention"])
    assert [str(r) for r in reasons] == [
        "dtype: expected float32, supports {bfloat16, float16}",
        "block: expected 24, supports multiples of 16",
        "sm: expected 80, supports at least 90",
        "dim: expected {64, 256}, supports 64 to 128",
        "q: expected 16, supports at most 8",
        "new: expected 1, supports nothing (not declared)",
        "feature 'sinks' not declared  (a learned logit per head that receives probability but adds no value)",
        'needs no_such_module, which is not installed  (pip install "minivllm[fi]")',
        f"numpy: expected at least 999, supports {numpy.__version__}",
    ]


@given(st.sets(st.integers(-300, 300), min_size=1), st.integers(-100, 100), st.integers(0, 200), st.integers(1, 64))
def test_limits_agree_with_their_meaning(values, low, span, step):
    high = low + span
    assert allows(Range(low, high), frozenset(values)) == all(low <= v <= high for v in values)
    assert allows(AtLeast(low), frozenset(values)) == (min(values) >= low)
    assert allows(AtMost(high), frozenset(values)) == (max(values) <= high)
    assert allows(MultipleOf(step), frozenset(values)) == all(v > 0 and v % step == 0 for v in values)
    assert allows({low, high}, frozenset(values)) == (values <= {low, high})
    assert allows(ANY, frozenset(values))
    assert not allows(AtLeast(0), "x") and not allows(MultipleOf(1), True)


# ---------------------------------------------------------------- selection


def registry_of(package, *specs):
    """(dist, name, priority, features) -> a registry with a spec module each."""
    entries = []
    for dist, name, priority, features in specs:
        module = f"{dist}_{name}_spec"
        package(module, spec_text(priority=priority, features=features))
        entries.append(Entry("attention", name, f"{module}:S", dist, "1.0"))
    return Registry(KINDS["attention"], entries)


def test_auto_takes_the_best_builtin_and_leaves_third_parties_unimported(package):
    registry = registry_of(
        package,
        ("minivllm", "low", 0, ["f"]),
        ("minivllm", "top", 10, ["f"]),
        ("minivllm", "new", 99, []),
        ("zz", "fast", 999, ["f"]),
    )
    selection = registry.select(PluginQuery({"dtype": "bfloat16", "block": 16}, frozenset({"f"})))
    assert selection.explain() == (
        "attention -> minivllm/top   (asked: auto)\n"
        "  for dtype=bfloat16, block=16, features={f}\n"
        "  - minivllm/low  priority 0: suitable, not needed\n"
        "  x minivllm/new  feature 'f' not declared\n"
        "  > minivllm/top  priority 10\n"
        "  . zz/fast       not looked at: an earlier choice was suitable"
    )
    assert "zz_fast_spec" not in sys.modules
    everything = registry.select(PluginQuery({}, frozenset({"f"})), everything=True)
    assert everything.chosen == selection.chosen and "zz_fast_spec" in sys.modules
    assert "- zz/fast       priority 999: suitable, not needed" in everything.explain()


def test_auto_goes_to_third_parties_if_no_builtin_can_serve(package):
    registry = registry_of(package, ("minivllm", "a", 0, []), ("zz", "b", 1, ["f"]), ("zz", "c", 1, ["f"]))
    # the name decides between equals
    assert registry.select(PluginQuery({}, frozenset({"f"}))).require().entry.label == "zz/b"


def test_a_name_never_falls_back(package):
    registry = registry_of(package, ("minivllm", "a", 0, []), ("minivllm", "b", 0, ["f"]))
    selection = registry.select(PluginQuery({}, frozenset({"f"})), "a")
    with pytest.raises(PluginError) as info:
        selection.require()
    assert str(info.value) == "attention 'minivllm/a' does not fit: feature 'f' not declared"
    assert info.value.selection is selection


def test_prefer_is_an_order_and_what_is_absent_is_a_reason(package):
    registry = registry_of(package, ("minivllm", "a", 99, []), ("zz", "b", 0, ["f"]), ("zz", "c", 5, ["f"]))
    selection = registry.select(PluginQuery({}, frozenset({"f"})), prefer=("gone/x", "a", "zz/b", "c"))
    assert selection.explain() == (
        "attention -> zz/b   (asked: auto, prefer gone/x, a, zz/b, c)\n"
        "  for features={f}\n"
        "  x gone/x      not installed\n"
        "  x minivllm/a  feature 'f' not declared\n"
        "  > zz/b        priority 0\n"
        "  . zz/c        not looked at: an earlier choice was suitable"
    )


def test_nothing_suitable_is_an_error_that_shows_the_selection(package):
    registry = registry_of(package, ("minivllm", "a", 0, []))
    with pytest.raises(PluginError) as info:
        registry.select(PluginQuery({}, frozenset({"f"}))).require()
    assert str(info.value) == (
        "attention -> nothing suitable   (asked: auto)\n  for features={f}\n  x minivllm/a  feature 'f' not declared"
    )


def test_a_spec_can_be_pickled_and_reports_what_limits_cannot_say():
    def check(request):
        return [Reason("heads", "a multiple of 8", "4")]

    for spec in (
        Spec("a:B", (1, 0), "x", limits={"sm": AtLeast(90)}, needs=(Needs("json"),)),
        Spec("a:B", (1, 0), "x", limits=ANY),
    ):
        again = pickle.loads(pickle.dumps(spec))
        assert again == spec and not again.refuse(PluginQuery({"sm": 90}), KINDS["attention"])
    checked = Spec("a:B", (1, 0), "x", limits=ANY, check=check)
    (reason,) = checked.refuse(PluginQuery(), KINDS["attention"])
    assert str(reason) == "heads: expected a multiple of 8, supports 4"


# ---------------------------------------------------------------- broken plug-ins, and what is left open


def test_a_broken_plugin_in_a_list_of_preferences_is_an_error_and_a_blocked_one_is_passed_over(package):
    package("acme_boom_spec", "raise RuntimeError('boom')")
    points = [point("acme", "flash", "acme_boom_spec:S")]
    with pytest.raises(PluginError) as info:
        discover(*points)["attention"].select(PluginQuery(), prefer=("gone/x", "acme/flash", "sdpa"))
    assert str(info.value) == (
        "attention 'acme/flash' (acme 1.0, entry point 'acme_boom_spec:S') could not be imported: RuntimeError: boom"
    )
    shut = discover(*points, environ={"MINIVLLM_PLUGINS": ""})["scheduler"]
    assert shut.select(PluginQuery(), prefer=("fcfs",)).chosen
    shut = discover(*points, environ={"MINIVLLM_PLUGINS": ""})["attention"].select(
        PluginQuery(), prefer=("acme/flash",)
    )
    assert [str(r) for r in shut.candidates[0].reasons] == ["blocked by MINIVLLM_PLUGINS"] and shut.chosen is None


CHECKED = """
from minivllm.registration.spec import *
def check(request): return 1 / 0
S = Spec("acme:Flash", (1, 0), "x", limits=ANY, features=frozenset({"f"}), check=check)
"""


def test_a_check_that_raises_is_a_reason_or_an_error_that_names_the_package(package):
    package("acme_check_spec", CHECKED)
    registry = discover(point("acme", "flash", "acme_check_spec:S"))["attention"]
    text = (
        "attention 'acme/flash' (acme 1.0, entry point 'acme_check_spec:S'): its spec raised an "
        "error while it was compared with the request: ZeroDivision"
    )
    selection = registry.select(PluginQuery(features=frozenset({"f"})))
    assert str(selection.candidates[-1].reasons[0]).startswith(text) and selection.chosen is None
    with pytest.raises(PluginError) as info:
        registry.select(PluginQuery(), "flash")
    assert str(info.value).startswith(text)


@pytest.mark.parametrize(
    "body, message",
    [
        ("return ['too old']", "TypeError: check() gave 'too old': expected a list of Reason"),
        ("return 'too old'", "TypeError: check() gave 't': expected a list of Reason"),
        ("raise Panic('no device')", "Panic: no device"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_check_that_gives_no_reasons_or_panics_is_a_reason_like_any_fault(package, body, message):
    text = f"class Panic(BaseException): pass\ndef check(request):\n    {body}\n"
    package("acme_panic_spec", text + spec_text().replace('"for a test"', '"for a test", check=check'))
    registry = discover(point("acme", "flash", "acme_panic_spec:S"))["attention"]
    selection = registry.select(PluginQuery(features=frozenset()), "sdpa", everything=True)
    (reason,) = next(c for c in selection.candidates if c.entry.dist == "acme").reasons
    assert str(reason).endswith(f"its spec raised an error while it was compared with the request: {message}")
    json.dumps(selection.as_dict())


def test_a_needed_version_is_told_though_the_metadata_of_another_package_is_broken(tmp_path, monkeypatch):
    install(tmp_path, "other", {}, metadata="", version="1")
    (tmp_path / "other-1.dist-info" / "METADATA").write_bytes(b"Name: \xff\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert Needs("numpy", "1").missing() is None and Needs("numpy", "1").installed_version()
    assert str(Needs("numpy", "9999").missing()).startswith("numpy: expected at least 9999, supports ")


def test_a_needed_version_is_told_without_reading_the_metadata_of_every_package(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: pytest.fail("it takes seconds"))
    assert Needs("numpy", "1").missing() is None and Needs("numpy.linalg", dist="numpy").installed_version()
    assert Needs("minivllm.registration.spec", dist="no-such").installed_version() is None


def test_a_needed_version_is_that_of_the_package_that_brings_a_module_of_another_name():
    assert Needs("yaml", "1").installed_version() == importlib.metadata.version("pyyaml")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"impl": "acme.Flash"}, "Spec impl='acme.Flash': expected 'package.module:Class'"),
        ({"api": "1.0"}, "Spec api='1.0': expected (major, minor)"),
        ({"api": (1,)}, "Spec api=(1,): expected (major, minor)"),
        ({"limits": {"device": "cuda"}},
         "Spec limits['device']='cuda': expected a set, AtLeast, AtMost, Range, MultipleOf, ANY"),
        ({"limits": [1]}, "Spec limits=[1]: expected a dict of fact -> limit, or ANY"),
        ({"features": "window"}, "Spec features='window': expected a frozenset of names"),
        ({"needs": Needs("json")},
         "Spec needs=Needs(module='json', version='', install='', dist=''): expected (Needs(...),)"),
        ({"priority": "high"}, "Spec priority='high': expected a whole number"),
        ({"check": True}, "Spec check=True: expected a function (PluginQuery) -> [Reason]"),
    ],
)  # fmt: skip
def test_a_spec_of_the_wrong_form_fails_where_it_is_written(wrong, message):
    with pytest.raises(TypeError) as info:
        Spec(**{"impl": "a:B", "api": (1, 0), "summary": "x", **wrong})
    assert str(info.value) == message


def test_a_needed_version_is_the_lowest_one_not_a_specifier():
    with pytest.raises(
        ValueError, match=r"^Needs\('a'\): version='>=2.1': expected the lowest version, such as '2.1'$"
    ):
        Needs("a", ">=2.1")


def test_what_the_user_left_open_is_supplied_by_the_chosen_plugin(package):
    text = spec_text().replace('"for a test"', '"for a test", prefer={"block": 32}')
    package("acme_open_spec", text)
    registry = discover(point("acme", "flash", "acme_open_spec:S"))["attention"]
    left = registry.select(PluginQuery({"dtype": "float32"}), "acme/flash")
    assert left.supplied == {"block": 32}
    assert left.explain().splitlines()[2:] == [
        "  > acme/flash  priority 0",
        "      supplies block=32: it was left open",
    ]
    assert registry.select(PluginQuery({"block": 16}), "acme/flash").supplied == {}


def test_a_selection_is_json_with_every_reason(package):
    registry = registry_of(package, ("minivllm", "a", 5, []), ("minivllm", "b", 0, ["f"]), ("zz", "c", 0, ["f"]))
    found = registry.select(PluginQuery({"dim": frozenset({64, 8})}, frozenset({"f"}))).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["seam"], found["asked"], found["chosen"]) == ("attention", "auto", "minivllm/b")
    assert (found["facts"], found["features"], found["skipped"]) == ({"dim": [8, 64]}, ["f"], ["zz/c"])
    first, second = found["candidates"]
    assert not first["suitable"] and [r["text"] for r in first["reasons"]] == ["feature 'f' not declared"]
    assert second["suitable"] and second["impl"] == "acme:Flash" and second["version"] == "1.0"


def test_a_class_that_leaves_out_a_method_is_refused_when_it_is_loaded(package):
    package(
        "acme_part", "from minivllm.core.interfaces.evictor import Evictor\nclass Half(Evictor):\n  free = drop = 1\n"
    )
    package("acme_part_spec", spec_text(impl="acme_part:Half"))
    registry = discover(point("acme", "half", "acme_part_spec:S", kind="evictor"))["evictor"]
    with pytest.raises(PluginError) as info:
        registry.load(registry.select(PluginQuery(), "half").require())
    assert str(info.value) == (
        "evictor 'acme/half' (acme 1.0, entry point 'acme_part_spec:S'): Half does not implement add, hold, victims"
    )


# ---------------------------------------------------------------- options


OPTIONS = """
from pydantic import BaseModel, ConfigDict, Field
from minivllm.registration.spec import *
class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    num_splits: int = Field(1, le=64, description="parts")
S = Spec(impl="acme:Flash", api=(1, 0), summary="x", limits=ANY, options="acme_spec:Options")
"""


def test_wrong_options_are_told_with_the_nearest_name(package):
    package("acme_spec", OPTIONS)
    registry = discover(point("acme", "flash", "acme_spec:S"))["attention"]
    chosen = registry.select(PluginQuery(), "flash").require()
    assert registry.options(chosen, {"num_splits": 4}).num_splits == 4
    where = {"attention.options.num_splits": "exp.toml:4", "attention.options.numsplits": "--set"}
    with pytest.raises(PluginError) as info:
        registry.options(chosen, {"num_splits": 65, "numsplits": 1}, "attention.options", where)
    assert str(info.value) == (
        "Wrong options for acme/flash:\n"
        "  exp.toml:4: attention.options.num_splits=65: expected a whole number of at most 64\n"
        "  --set: unknown option 'attention.options.numsplits'. Did you mean 'num_splits'?"
    )


def test_a_plugin_without_options_takes_none():
    registry = discover()["scheduler"]
    chosen = registry.select(PluginQuery(), "fcfs").require()
    assert registry.options(chosen, {}) is None
    with pytest.raises(PluginError) as info:
        registry.options(chosen, {"window": 4}, origins={"scheduler.options.window": "exp.toml:4"})
    assert str(info.value) == "exp.toml:4: minivllm/fcfs takes no options: scheduler.options has 'window'"


# ---------------------------------------------------------------- prefer


def test_a_misspelt_name_in_a_list_to_prefer_is_told_and_one_that_is_not_installed_is_passed_over():
    registry = discover(point("acme", "flash", "acme_spec:S"))["attention"]
    for name, hint in (
        ("trition", " Did you mean 'triton'?"),
        ("minivllm/zebra", ""),
        ("acme/flsh", " Did you mean 'acme/flash'?"),
    ):
        with pytest.raises(PluginError) as info:
            registry.select(PluginQuery(), prefer=(name, "sdpa"))
        assert str(info.value).startswith(f"No attention is called {name!r}.{hint}\n  Installed: flash_attn, ")
        assert ", sdpa, triton, acme/flash" in str(info.value)
        assert str(info.value).endswith("write 'dist/name' for a plug-in that is not installed.")
    with pytest.raises(PluginError, match="is a target, and a target runs code"):
        registry.select(PluginQuery(), prefer=("my.module:Class",))
    absent = ("zebra", "zz/flash", "zz/sdpa")
    selection = registry.select(FITS, prefer=(*absent, "sdpa"))
    assert [str(c.reasons[0]) for c in selection.candidates[:3]] == ["not installed"] * 3
    assert selection.chosen.entry.label == "minivllm/sdpa"
    assert [registry.installed(name) for name in (*absent, "sdpa", "acme/flash", "m:C")] == [False] * 3 + [True] * 3


def test_a_blocked_plugin_in_a_list_to_prefer_is_passed_over():
    registry = discover(point("acme", "flash", "acme_spec:S"), environ={"MINIVLLM_PLUGINS": ""})["attention"]
    for name in ("flash", "acme/flash"):
        selection = registry.select(FITS, prefer=(name, "sdpa"))
        assert str(selection.candidates[0].reasons[0]) == "blocked by MINIVLLM_PLUGINS"
        assert selection.chosen.entry.label == "minivllm/sdpa"


FITS = PluginQuery({
    "device": "cpu", "dtype": "float32", "kv_format": "fp32", "dim_qk": 64, "dim_v": 64, "queries_per_kv": 2,
})  # fmt: skip


def test_a_module_within_packages_without_an_init_is_found_and_nothing_of_them_is_imported(tmp_path, monkeypatch):
    (tmp_path / "spacious" / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "spacious" / "inner" / "deep" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert Needs("spacious.inner.deep").missing() is None and "spacious" not in sys.modules
    assert Needs("spacious.inner.none").missing() is not None and Needs("spacious.none.deep").missing() is not None


def test_an_approximate_plug_in_is_chosen_by_its_name_only_and_the_choice_says_so(tmp_path, monkeypatch):
    """``auto`` passes over it even if no other plug-in fits.  A name, or a list of preferred names, chooses it."""
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "from minivllm.plugin import ANY, Spec\n"
        "S = Spec('impl:A', (1, 0), 'x', limits={'kv_format': {'acme/own'}}, traits={'approximate': True})\n"
        "E = Spec('impl:A', (1, 0), 'x', limits={'kv_format': {'acme/own'}}, traits={'approximate': False})\n"
    )
    points = {"minivllm.attention": {"some": "specs_of_acme:S", "exact": "specs_of_acme:E"}}
    install(tmp_path, "acme", points, specs_of_acme=text)
    registry = Catalog.discover(environ={})["attention"]
    request = PluginQuery({"kv_format": "acme/own"})
    auto = registry.select(request, everything=True)
    assert auto.chosen.entry.label == "acme/exact" and not auto.approximate
    assert "x acme/some" in auto.explain() and "approximate: it is chosen by its name only" in auto.explain()
    for chosen in (registry.select(request, "acme/some"), registry.select(request, prefer=["acme/some"])):
        assert chosen.chosen.entry.label == "acme/some" and chosen.approximate
        assert "approximate: queries attend to some of the keys" in chosen.explain()
        assert chosen.as_dict()["approximate"] is True
    assert not registry.select(PluginQuery({"device": "cpu"}), "sdpa").approximate
