"""``minivllm plugins check``: whatever importing a plug-in does, a report comes back."""

from __future__ import annotations

import json

import pytest
from plugin_helpers import install, spec_text

from minivllm.cli import main
from minivllm.cli.plugin_check import check_one, spec_faults
from minivllm.registration.discovery import BUILTIN
from minivllm.registration.spec import KINDS, AtLeast, Spec
from minivllm.registry import Catalog

IMPL = """
from minivllm.core.interfaces.evictor import Evictor
class Good(Evictor):
    add = hold = free = victims = drop = hit = lambda *a: None
class Half(Evictor):
    pass
"""


@pytest.fixture
def evictors(tmp_path, monkeypatch):
    """Return a function that installs a package ``acme`` with evictors whose spec modules are given as text, and
    returns its entries by name.
    """
    monkeypatch.syspath_prepend(tmp_path)

    def write(metadata="", **specs):
        points = {"minivllm.evictor": {name: f"check_{name}:S" for name in specs}}
        modules = {f"check_{name}": text for name, text in specs.items()}
        install(tmp_path, "acme", points, metadata=metadata, check_impl=IMPL, **modules)
        return {e.name: e for e in Catalog.discover(environ={})["evictor"].entries}

    return write


GOOD = spec_text(impl="check_impl:Good")


@pytest.mark.parametrize(
    "text, fault",
    [
        ("import os\nos.kill(os.getpid(), 11)", "importing it killed the process: SIGSEGV"),
        ("import os\nprint('last words', file=__import__('sys').stderr, flush=True)\nos._exit(3)",
         "importing it ended the process with exit code 3 (last words)"),
        ("raise SystemExit('bye')", "could not be imported: SystemExit: bye"),
        ("import numpy\n" + GOOD, "its spec imports numpy: keep the module of the spec, and its package, light"),
        (spec_text(impl="check_impl:Half"), "Half does not implement add, drop, free, hold, victims"),
        (spec_text(impl="check_impl:Full"), "AttributeError: module 'check_impl' has no attribute 'Full'"),
        (spec_text(impl="check_impl:Good", api=(1, 9)),
         "contract version: expected 1.2, supports 1.9  (written for a newer minivllm: upgrade minivllm)"),
        (spec_text(impl="check_impl:Good", features=["fast"]),
         "its spec's features name 'fast', which evictor does not have. There are: none."),
        (GOOD.replace('"for a test"', '"for a test", options="json:JSONDecoder"'),
         "Spec.options names 'json:JSONDecoder', which is not a class of pydantic.BaseModel"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n" + GOOD,
         "importing it starts threads: start them when an instance is made"),
    ],
)  # fmt: skip
def test_a_fault_is_told_and_the_rest_goes_on(evictors, text, fault):
    report = check_one(evictors(bad=text)["bad"])
    assert report.word == "FAULTY" and any(fault in f for f in report.faults), report.faults
    json.dumps(report.as_dict())


def test_a_plugin_that_hangs_is_given_up(evictors):
    report = check_one(evictors(slow="import time\ntime.sleep(60)")["slow"], timeout=1.0)
    assert report.faults == ("importing it had not ended after 1 s",)


def test_check_prints_times_and_ends_with_4_if_there_is_a_fault(evictors, capsys):
    noisy = "print('x' * 100)\nimport time\ntime.sleep(0.05)\n" + GOOD
    missing = GOOD.replace('"for a test"', '"for a test", needs=(Needs("no_such", install="pip install no"),)')
    entries = evictors(good=noisy, absent=missing, ends="raise SystemExit(0)")
    assert main(["plugins", "check", "acme/good"]) == 0
    head, line, more = capsys.readouterr().out.splitlines()
    assert more.strip() == "whether they do what they claim: python -m minivllm.testing acme/good"
    assert head.split() == ["result", "spec", "ms", "impl", "ms", "plug-in"]
    word, spec_ms, impl_ms, *name = line.split()
    assert (word, name) == ("ok", ["evictor", "acme/good"]) and float(spec_ms) >= 50 and float(impl_ms) < float(spec_ms)
    assert main(["plugins", "check"]) == 4  # all of other packages
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines if line[0] != " "] == ["missing", "FAULTY", "ok"]
    assert "needs no_such, which is not installed  (pip install no)" in lines[1]
    assert main(["plugins", "check", "absent", "--json"]) == 4  # it was named, and cannot be checked
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert report["result"] == "missing" and report["faults"] == [] and report["impl_ms"] is None
    assert len(entries) == 3 + sum(e.builtin for e in entries.values())


def test_check_tells_what_discovery_found_and_what_the_package_requires(evictors, capsys, tmp_path):
    evictors(metadata="Requires-Dist: minivllm>=7\n", good=GOOD)
    install(tmp_path, "other", {"minivllm.evictors": {"x": "a:S"}})
    assert main(["plugins", "check", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["reports"][0]["faults"][0].startswith("acme 1.0 requires minivllm>=7, and this is ")
    assert found["faults"] == [
        "other 1.0: 'x' is in the entry-point group 'minivllm.evictors', and there is no such "
        "seam. Did you mean 'minivllm.evictor'?"
    ]


def test_a_plugin_that_is_not_there_is_told(capsys):
    assert main(["plugins", "check", "lur"]) == 4
    assert capsys.readouterr().err == (
        "minivllm: error: No plug-in is called 'lur'. Did you mean 'lru'? `minivllm plugins` lists them.\n"
    )
    assert main(["plugins", "show", "evictor"]) == 4
    wanted = "minivllm: error: 'evictor' is a kind of plug-in; `minivllm plugins evictor` lists the plug-ins.\n"
    assert capsys.readouterr().err == wanted
    assert main(["plugins", "check", "lru", "fcfs"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["result", "ok", "ok"]


def test_a_spec_is_held_to_the_words_of_its_seam():
    limits = {"device": {"cpu"}, "head_dim": AtLeast(8), "block": {32}}
    spec = Spec("a:B", (1, 0), "x", limits=limits, prefer={"block": 16, "dtype": "float16"}, traits={"grph": "none"})
    faults = spec_faults(spec, KINDS["attention"])
    assert (
        "its spec's limits name 'head_dim', which attention does not have. There are: device, sm, dtype, " in faults[0]
    )
    assert faults[1:3] == [
        "its spec's traits name 'grph', which attention does not have. Did you mean 'graph'?",
        "its spec's prefer name 'dtype', which attention does not have. There are: block.",
    ]
    assert "its spec's limits do not speak of 'sm': a request that asks for it is refused" in faults
    assert faults[-1] == "its spec prefers what it refuses: block: expected 16, supports {32}"


def test_specs_of_built_in_plugins_use_only_names_that_their_seams_know():
    catalog = Catalog.discover()
    unknown = [
        (entry.kind, entry.label, fault)
        for kind in KINDS
        for entry in catalog[kind].entries
        if entry.dist == BUILTIN
        for fault in spec_faults(catalog[kind].spec(entry), KINDS[kind])
        if "does not have" in fault
    ]
    assert not unknown
