"""The registry: installed plug-ins, the choice, and the exact text of every refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from plugin_helpers import discover, point, spec_text, write_package

import minivllm
from minivllm.config.files import tomllib
from minivllm.errors import PluginError
from minivllm.plugins.specs import BUILTINS
from minivllm.registration import discovery
from minivllm.registration.parameters import Param
from minivllm.registration.spec import ANY, TRAIT_FORMS, Spec, check_seam
from minivllm.registry import (
    KINDS,
    RESERVED,
    Catalog,
    PluginQuery,
    import_target,
)

package = pytest.fixture(write_package)
ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- built-ins


def test_the_table_of_builtins_is_sorted_and_has_no_name_twice():
    keys = [(kind, name) for kind, name, _ in BUILTINS]
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, name, _ in BUILTINS])
def test_every_builtin_has_a_spec_of_the_current_interface_and_an_implementation_that_fills_the_seam(kind, name):
    registry = discover()[kind]
    (candidate,) = registry.select(PluginQuery(), name).candidates
    assert candidate.spec.api == KINDS[kind].api and candidate.spec.summary
    missing = [reason for needs in candidate.spec.needs if (reason := needs.missing())]
    assert list(candidate.reasons) == missing
    if not missing:
        assert issubclass(registry.load(candidate), import_target(KINDS[kind].base))


@pytest.mark.parametrize("kind", KINDS)
def test_the_version_of_a_kind_is_that_of_its_interface_module(kind):
    assert import_target(KINDS[kind].base.partition(":")[0] + ":API") == KINDS[kind].api
    assert KINDS[kind].group == f"minivllm.{kind}"


def test_the_version_is_that_of_pyproject():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == minivllm.__version__


def test_specs_and_discovery_import_nothing_heavy():
    code = (
        "import sys; from minivllm.registry import Catalog; c = Catalog.discover();"
        "[r.spec(e) for r in c.values() for e in r.entries];"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'numpy') if m in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_one_question_to_the_package_metadata(monkeypatch):
    import importlib.metadata as metadata

    calls = []
    real = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **kw: calls.append(kw) or real(**kw))
    monkeypatch.setattr(discovery, "_cached", None)
    assert Catalog.discover(environ={}).entries == Catalog.discover(environ={}).entries
    assert calls == [{}]


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---------------------------------------------------------------- names


def test_an_unknown_name_says_what_is_there():
    with pytest.raises(PluginError) as info:
        discover()["attention"].find("spda")
    assert str(info.value) == (
        "No attention is called 'spda'. Did you mean 'sdpa'?\n"
        "  Installed: flash_attn, flash_attn2, flashinfer, sdpa, triton\n"
        "  A package adds one with the entry-point group 'minivllm.attention'; an experiment can say 'module:Class'."
    )


def test_a_name_offered_twice_must_be_said_in_full():
    registry = discover(point("b", "x", "b:S"), point("a", "x", "a:S"))["attention"]
    with pytest.raises(PluginError) as info:
        registry.find("x")
    assert str(info.value) == (
        "attention 'x' is offered by 2 packages. Say which one:\n    name = 'a/x'\n    name = 'b/x'"
    )
    assert registry.find("b/x").target == "b:S"


def test_a_builtin_name_cannot_be_taken_over():
    registry = discover(point("acme", "sdpa", "acme:S"))["attention"]
    assert registry.find("sdpa").label == "minivllm/sdpa" and registry.find("acme/sdpa").target == "acme:S"


def test_a_package_that_pretends_to_be_minivllm_replaces_nothing():
    registry = discover(point("minivllm", "sdpa", "evil:S"))["attention"]
    assert registry.find("sdpa").target == "minivllm.plugins.attention.spec:SDPA"


def test_an_editable_install_beside_a_wheel_is_one_plugin():
    registry = discover(point("Acme_Attn", "x", "a:S"), point("acme-attn", "x", "a:S"))["attention"]
    assert [e.label for e in registry.entries if not e.builtin] == ["acme-attn/x"]


def test_a_seam_that_is_reserved_or_unknown_is_refused():
    catalog = discover(point("acme", "disk", "acme:S", kind="trimmer"))
    assert [e.label for e in catalog.reserved] == ["acme/disk"]
    with pytest.raises(PluginError, match="The seam 'trimmer' is reserved: this version of minivllm has no contract"):
        catalog["trimmer"]
    with pytest.raises(PluginError) as info:
        catalog["atention"]
    assert str(info.value) == (
        "No seam is called 'atention'. Did you mean 'attention'? There are: adapter, attention, compressor, drafter, "
        "encoder, evictor, executor, grammar, hooks, kvformat, kvstore, model, parser, predictor, processor, "
        "quantizer, router, sampler, scheduler, strategy, tokenizer."
    )
    assert set(catalog) == set(KINDS) and not set(RESERVED) & set(KINDS) and "trimmer" not in catalog
    assert check_seam("kv_format") == "kvformat" and check_seam("processors") == "processor"
    assert check_seam("server.tool_parser") == "parser"


# ---------------------------------------------------------------- MINIVLLM_PLUGINS


@pytest.mark.parametrize(
    "value, visible",
    [(None, "a b c"), ("", ""), ("a,b", "a b"), ("-a", "b c"), ("a, b,-b", "a"), ("-a,-b", "c")],
)
def test_the_environment_says_which_packages_are_seen(value, visible):
    environ = {} if value is None else {"MINIVLLM_PLUGINS": value}
    entries = discover(*(point(d, "x", f"{d}:S") for d in "abc"), environ=environ)["attention"].entries
    assert [e.dist for e in entries if not e.builtin and not e.blocked] == visible.split()
    assert not entries[0].blocked  # a built-in


def test_the_environment_cannot_name_what_is_not_there():
    with pytest.raises(PluginError) as info:
        discover(point("a", "x", "a:S"), environ={"MINIVLLM_PLUGINS": "aa"})
    assert str(info.value) == (
        "MINIVLLM_PLUGINS names aa, but no such package offers a minivllm plugin. Remove them. Installed: a."
    )


def test_minivllm_itself_may_be_named_and_cannot_be_shut_out():
    offered = point("a", "x", "a:S")
    entries = discover(offered, environ={"MINIVLLM_PLUGINS": "minivllm"})["attention"].entries
    assert [e.dist for e in entries if e.blocked] == ["a"]
    for value in ("-minivllm", "-", "- a"):
        with pytest.raises(PluginError) as info:
            discover(offered, environ={"MINIVLLM_PLUGINS": value})
        want = "expected names of packages, each with or without a leading '-'; minivllm itself cannot be blocked"
        assert str(info.value) == f"MINIVLLM_PLUGINS={value!r}: {want}"


def test_a_package_in_another_spelling_is_suggested_in_its_own():
    with pytest.raises(PluginError, match=r"^No attention is called 'Acme_Attn/x'. Did you mean 'acme-attn/x'"):
        discover(point("acme.attn", "x", "a:S"))["attention"].find("Acme_Attn/x")


def test_a_blocked_plugin_is_not_imported(package):
    package("shut", "raise AssertionError('imported')")
    registry = discover(point("shut", "x", "shut:S"), environ={"MINIVLLM_PLUGINS": ""})["attention"]
    with pytest.raises(
        PluginError,
        match=r"^attention 'shut/x' \(shut 1.0, entry point 'shut:S'\) is blocked by MINIVLLM_PLUGINS; change or unset",
    ):
        registry.find("x")
    selection = registry.select(PluginQuery({"nobody": 1}), everything=True)
    assert "  x shut/x                blocked by MINIVLLM_PLUGINS\n" in selection.explain() + "\n"
    assert "shut" not in sys.modules


# ---------------------------------------------------------------- specs


def test_a_broken_spec_is_an_error_if_asked_for_and_a_line_if_not(package):
    package("acme_sparse", "raise RuntimeError('boom')")
    registry = discover(point("acme", "sparse", "acme_sparse:SPEC"))["attention"]
    text = (
        "attention 'acme/sparse' (acme 1.0, entry point 'acme_sparse:SPEC') could not be imported: RuntimeError: boom"
    )
    with pytest.raises(PluginError) as info:
        registry.select(PluginQuery(), "sparse")
    assert str(info.value) == text and isinstance(info.value.__cause__, RuntimeError)
    assert f"  x acme/sparse           {text}" in registry.select(PluginQuery(), everything=True).explain()


def test_a_spec_module_that_exits_does_not_take_the_engine_along(package):
    package("quits", "raise SystemExit('bye')")
    with pytest.raises(PluginError, match="SystemExit: bye"):
        discover(point("q", "x", "quits:S"))["attention"].select(PluginQuery(), "x")


def test_something_else_than_a_spec_is_refused(package):
    package("other", "S = {}")
    with pytest.raises(PluginError) as info:
        discover(point("o", "x", "other:S"))["attention"].select(PluginQuery(), "x")
    assert (
        str(info.value) == "attention 'o/x' (o 1.0, entry point 'other:S'): 'other:S' is a dict; "
        "expected an object of class minivllm.plugin.Spec"
    )


def test_an_implementation_that_does_not_fill_the_seam_is_refused(package):
    package("acme", "class Flash: pass")
    package("acme_spec", spec_text())
    registry = discover(point("acme", "flash", "acme_spec:S"))["attention"]
    with pytest.raises(PluginError) as info:
        registry.load(registry.select(PluginQuery(), "flash").require())
    assert str(info.value) == (
        "attention 'acme/flash' (acme 1.0, entry point 'acme_spec:S'): Flash is not a subclass of "
        "minivllm.core.interfaces.attention.AttentionBackend"
    )


@pytest.mark.parametrize(
    "api, reason",
    [
        ((0, 9), "contract version: expected 1.7, supports 0.9  (written for an older minivllm: upgrade it)"),
        ((1, 8), "contract version: expected 1.7, supports 1.8  (written for a newer minivllm: upgrade minivllm)"),
        ((2, 0), "contract version: expected 1.7, supports 2.0  (written for a newer minivllm: upgrade minivllm)"),
    ],
)
def test_another_interface_version_is_refused(package, api, reason):
    package("acme_spec", spec_text(api=api))
    selection = discover(point("acme", "flash", "acme_spec:S"))["attention"].select(PluginQuery(), "flash")
    assert [str(r) for r in selection.candidates[0].reasons] == [reason]
    with pytest.raises(PluginError) as info:
        selection.require()
    assert str(info.value) == f"attention 'acme/flash' (acme 1.0, entry point 'acme_spec:S') does not fit: {reason}"


# ---------------------------------------------------------------- targets


MINE = """
from minivllm.core.interfaces.scheduler import SchedulerPolicy
from os import system
class Mine(SchedulerPolicy):
    "Last come, first served."
"""


def test_a_target_needs_leave(package):
    package("my_exp", MINE)
    registry = discover()["scheduler"]
    with pytest.raises(PluginError) as info:
        registry.find("my_exp:Mine")
    assert str(info.value) == (
        "scheduler: 'my_exp:Mine' is a target, and a target runs code. "
        "Add --allow-target my_exp if you trust it (allow_targets=['my_exp'] in Python)"
    )
    assert "my_exp" not in sys.modules
    registry = discover().allow(["my_exp"])["scheduler"]
    chosen = registry.select(PluginQuery(), "my_exp:Mine").require()
    assert chosen.spec.summary == "Last come, first served." and registry.load(chosen).__name__ == "Mine"


def test_where_a_target_is_looked_for_is_said_if_it_is_not_found(package):
    package("my_exp", "import no_such_library\n")
    registry = discover().allow(["my_expp", "my_exp"])["scheduler"]
    with pytest.raises(PluginError, match=r"No module named 'my_expp'\. Add its folder to PYTHONPATH"):
        registry.select(PluginQuery(), "my_expp:Mine")
    with pytest.raises(PluginError, match=r"No module named 'no_such_library'$"):  # no fault of the path to my_exp
        registry.select(PluginQuery(), "my_exp:Mine")


def test_what_a_target_really_is_must_be_allowed_too(package):
    package("my_exp", "from fractions import Fraction\n")
    registry = discover().allow(["my_exp"])["scheduler"]
    with pytest.raises(PluginError) as info:
        registry.select(PluginQuery(), "my_exp:Fraction")
    assert str(info.value) == (
        "scheduler: 'my_exp:Fraction' is really 'fractions:Fraction', which is not allowed. "
        "Add --allow-target fractions if you trust it (allow_targets=[...] in Python)"
    )


def test_a_function_is_no_plugin(package):
    package("my_exp", MINE)
    with pytest.raises(
        PluginError,
        match=r"'my_exp:system' is a builtin_function_or_method; expected an object of class minivllm.plugin.Spec",
    ):
        discover().allow(["my_exp"])["scheduler"].select(PluginQuery(), "my_exp:system")


def test_a_target_without_a_spec_is_still_refused_for_features(package):
    package("my_exp", MINE)
    selection = discover().allow(["my_exp"])["scheduler"].select(PluginQuery({"x": 1}, frozenset({"f"})), "my_exp:Mine")
    assert [str(r) for r in selection.candidates[0].reasons] == ["feature 'f' not declared"]


@pytest.mark.parametrize("target", ["nothing", "a.b", ":X", "json:"])
def test_a_target_has_a_module_and_a_name(target):
    with pytest.raises(ImportError, match=r"is not of the form 'package\.module:Name'"):
        import_target(target)


def test_a_plugin_of_the_major_before_is_refused_with_what_has_changed(package):
    package("acme", "class Runs: pass")
    package("acme_spec", spec_text("acme:Runs", (1, 0)))
    registry = discover(point("acme", "runs", "acme_spec:S", "executor"))["executor"]
    with pytest.raises(PluginError) as info:
        registry.select(PluginQuery(), "runs").require()
    assert "contract version: expected 2.17, supports 1.0  (written for an older minivllm: upgrade it; " in str(
        info.value
    )
    assert "wiring.run_ahead is wiring.steps.run_ahead" in str(info.value)


# ---- a text where a collection of texts is wanted --------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Spec("a:B", (1, 0), "x", features=frozenset("window")), "letters of a text"),
        (lambda: Spec("a:B", (1, 0), "x", features="window"), "expected a frozenset of names"),
        (lambda: Spec("a:B", (1, 0), "x", limits={"device": set("cuda")}), r"limits\['device'\].*letters of a text"),
        (lambda: Spec("a:B", (1, 0), "x", limits={"device": "cuda"}), "expected a set"),
        (lambda: Spec("a:B", (1, 0), "x", needs="torch"), r"expected \(Needs"),
        (lambda: Spec("a:B", (1, 0), "x", params="top_a"), r"expected \(Param"),
        (lambda: Spec("a:B", (1, 0), "x", traits="graph"), "expected a dict"),
        (lambda: Param("a", str, "x", choices="xyz"), "expected a tuple of texts"),
        (lambda: Param("a", int, 1, choices=("1",)), "expected none for a int"),
    ],
)
def test_a_text_is_not_taken_for_a_collection_of_its_letters(make, words):
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize(
    ("kind", "traits"),
    [
        ("model", {"ignores": "text"}), ("model", {"ignores": 3}), ("model", {"ignores": ("a", 1)}),
        ("attention", {"graph": "all"}), ("attention", {"plan": "gpu"}), ("attention", {"drafts": ["apart"]}),
        ("drafter", {"drafts": "4"}), ("drafter", {"drafts": -1}), ("evictor", {"order": "mru"}),
        ("executor", {"unused": ["sampler"]}), ("executor", {"unused": "smapler"}), ("executor", {"made_up": "f"}),
        ("executor", {"cluster": 1}), ("quantizer", {"bits": "4"}), ("quantizer", {"bits": 0}),
        ("quantizer", {"table": "0123"}), ("quantizer", {"group": 0.5}), ("quantizer", {"exponent": True}),
        ("quantizer", {"online": 4}),
    ],
)  # fmt: skip
def test_a_trait_of_another_form_is_refused_with_the_form_that_is_wanted(kind, traits):
    spec = Spec("a:B", KINDS[kind].api, "x", limits=ANY, traits=traits)
    (reason,) = spec.refuse(PluginQuery(), KINDS[kind])
    (name,) = traits
    assert f"trait {name!r}: expected " in str(reason) and repr(traits[name]) in str(reason)


def test_every_trait_has_a_form_and_every_builtin_keeps_to_it():
    assert {(k.name, name) for k in KINDS.values() for name in k.traits} == set(TRAIT_FORMS)
    for entry in Catalog.discover(environ={}).entries:
        if entry.builtin:
            spec = Catalog.discover(environ={})[entry.kind].spec(entry)
            assert not spec.trait_faults(KINDS[entry.kind]), entry
