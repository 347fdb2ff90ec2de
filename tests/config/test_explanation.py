"""The reasons for the chosen parts, in Python, as text and as JSON, and the report of a broken implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugin_helpers import install, spec_text, write_package

import minivllm
from minivllm import LLM, PluginError
from minivllm.cli import main

POCKET = Path(__file__).parents[2] / "minivllm" / "pocket" / "model"
pytestmark = pytest.mark.skipif(not POCKET.is_dir(), reason="the model is not in this tree")
package = pytest.fixture(write_package)
CPU = {"model": "pocket", "device": "cpu", "dtype": "float32"}
ON_CPU = ["--set", "device=cpu", "--set", "dtype=float32"]


def test_explain_in_python_gives_the_selections_and_their_text():
    found = minivllm.explain(**CPU, kvcache_block_size=32)
    (attention,) = found.of("attention")
    assert attention.chosen.entry.label == "minivllm/sdpa" and attention.request.facts["block"] == 32
    assert attention.supplied == {} and found.error is None
    assert len(found.of("processors")) == 7 and len(found.of()) == len(found.selections)
    assert str(found) == found.text() and "block          32 (asked for)" in found.text()
    assert found.text("attention") == attention.explain()
    with pytest.raises(PluginError, match="Did you mean 'attention'"):
        found.of("atention")


def test_what_nothing_suits_is_explained_and_what_is_wrong_raises():
    found = minivllm.explain(**CPU, batch_invariant=True, quantizer="int8")
    assert isinstance(found.error, PluginError) and found.selections[-1].chosen is None
    assert found.as_dict()["error"].startswith("quantizer 'minivllm/int8' does not fit")
    with pytest.raises(PluginError, match="No scheduler is called 'fcf'"):
        minivllm.explain(**CPU, scheduler="fcf")


def test_explain_as_json_is_what_python_gives(capsys):
    assert main(["explain", "attention", "--json", "--all", *ON_CPU]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == minivllm.explain(**CPU).as_dict("attention", all=True)
    (selection,) = shown["selections"]
    assert selection["supplied"] == {"block": 16} and shown["notes"]["block"] == "16 (supplied by minivllm/sdpa)"
    triton = next(c for c in selection["candidates"] if c["name"] == "minivllm/triton")
    device = {
        "what": "device",
        "want": "cpu",
        "have": "{cuda}",
        "fix": "",
        "text": "device: expected cpu, supports {cuda}",
    }
    assert device in triton["reasons"] and not triton["suitable"]


BROKEN = "import no_such_library\n"
NOISY = """
print("hello from a plug-in")
from minivllm.core.interfaces.evictor import Evictor
class Loud(Evictor):
    add = hold = free = victims = drop = hit = lambda *a: None
"""


def test_explain_does_not_approve_an_implementation_that_cannot_be_imported(package, tmp_path, capsys):
    package("acme_broken_impl", BROKEN)
    package("acme_broken_spec", spec_text(impl="acme_broken_impl:Arc"))
    install(tmp_path, "acme", {"minivllm.evictor": {"arc": "acme_broken_spec:S"}}, version="1.4")
    text = (
        "evictor 'acme/arc' (acme 1.4, entry point 'acme_broken_spec:S') could not be imported from "
        "'acme_broken_impl:Arc': ModuleNotFoundError: No module named 'no_such_library'"
    )
    found = minivllm.explain(**CPU, evictor="arc")
    assert str(found.error) == text and found.of("evictor")[0].chosen is None
    assert main(["explain", "evictor", "--set", "evictor=arc", *ON_CPU]) == 4
    shown = capsys.readouterr()
    assert shown.out == f"evictor -> nothing suitable   (asked: arc)\n  for anything\n  x acme/arc  {text}\n"
    assert main(["explain", "scheduler", "--set", "evictor=arc", *ON_CPU]) == 4  # the evictor belongs to another seam
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == f"minivllm: error: {text}\n"
    with pytest.raises(PluginError) as info:
        LLM(**CPU, evictor="arc", max_num_seqs=2, max_num_batched_tokens=64, num_kvcache_blocks=32)
    assert str(info.value) == text  # the engine and explain print the same


def test_what_a_plugin_prints_when_it_is_imported_is_no_part_of_the_answer(package, tmp_path, capsys):
    package("acme_noisy", NOISY)
    package("acme_noisy_spec", spec_text(impl="acme_noisy:Loud"))
    install(tmp_path, "acme", {"minivllm.evictor": {"loud": "acme_noisy_spec:S"}})
    assert main(["explain", "evictor", "--json", "--set", "evictor=loud", *ON_CPU]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["selections"][0]["chosen"] == "acme/loud" and "hello from a plug-in" in shown.err


SIZES = """
from dataclasses import replace
from minivllm.plugins.attention.spec import SDPA
from minivllm.registration.spec import MultipleOf
limits = {**SDPA.limits, "block": MultipleOf(48)}
OWN = replace(SDPA, limits=limits, prefer={"block": 64})
NONE = replace(SDPA, limits=limits, prefer={})
"""


@pytest.mark.parametrize("name, whose, block", [("OWN", "its own", 64), ("NONE", "the default", 16)])
def test_a_block_size_that_the_spec_supplies_must_be_one_that_it_supports(package, tmp_path, name, whose, block):
    package("acme_size", SIZES)
    install(tmp_path, "acme", {"minivllm.attention": {"flash": f"acme_size:{name}"}})
    with pytest.raises(PluginError) as info:
        minivllm.explain(**CPU, attention="flash")
    assert str(info.value) == (
        f"attention 'acme/flash' (acme 1.0, entry point 'acme_size:{name}'): the configuration sets no block size, and "
        f"the plug-in's spec does not support {whose}: block: expected {block}, supports multiples of 48"
    )
    assert minivllm.explain(**CPU, attention="flash", kvcache_block_size=96).error is None


def test_an_engine_gives_its_selections():
    with LLM(**CPU, max_num_seqs=2, max_num_batched_tokens=64, num_kvcache_blocks=32) as llm:
        assert [s.kind for s in llm.selections] == [s.kind for s in minivllm.explain(**CPU).selections]
        assert llm.explain("attention") == next(s for s in llm.selections if s.kind == "attention").explain()
