"""``figures()`` of plug-ins of every seam: in statistics, records, comparisons, replays and simulations."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from cli_helpers import run_cli
from simulated_costs import COSTS

from minivllm import LLM, SamplingParams
from minivllm.plugins.model.qwen3 import Qwen3
from minivllm.runtime.hooks.figures import PluginFigures, flat, text

OWN = """
from dataclasses import replace

from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA
from minivllm.plugins.drafter.ngram import NGram
from minivllm.plugins.drafter.spec import NGRAM
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.evictor.spec import LRU
from minivllm.plugins.executor.local import Local
from minivllm.plugins.executor.process import Process
from minivllm.plugins.executor.spec import LOCAL, PROCESS
from minivllm.plugins.grammar.llguidance_plugin import LLGuidance
from minivllm.plugins.grammar.spec import LLGUIDANCE
from minivllm.plugins.kvformat.plain import Fp32
from minivllm.plugins.kvformat.spec import FP32
from minivllm.plugins.processor.penalties import Penalties
from minivllm.plugins.processor.spec import PENALTIES
from minivllm.plugins.quantizer.none import Unquantized
from minivllm.plugins.quantizer.spec import NONE
from minivllm.plugins.sampler.default import DefaultSampler
from minivllm.plugins.sampler.spec import DEFAULT
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.plugins.scheduler.spec import FCFS
from minivllm.plugins.strategy.single import Single
from minivllm.plugins.strategy.spec import SINGLE
from minivllm.registration.spec import ANY


def counting(name, base, method, spec):
    class Counts(base):
        calls = 0

        def figures(self):
            return {"calls": self.calls, "share": 0.5}

    def counted(self, *args, **kwargs):
        self.calls += 1
        return getattr(base, method)(self, *args, **kwargs)

    setattr(Counts, method, counted)
    Counts.__name__ = Counts.__qualname__ = name
    Counts.spec = replace(spec, impl=f"own_figures:{name}")
    return Counts


Attention = counting("Attention", Sdpa, "plan", replace(SDPA, limits={**SDPA.limits, "kv_format": ANY}))
Draft = counting("Draft", NGram, "propose", NGRAM)
Evict = counting("Evict", Lru, "free", LRU)
Here = counting("Here", Local, "submit", LOCAL)
There = counting("There", Process, "submit", PROCESS)
Words = counting("Words", LLGuidance, "compile", LLGUIDANCE)
Kept = counting("Kept", Fp32, "store", FP32)
Penalty = counting("Penalty", Penalties, "bind", PENALTIES)
Weights = counting("Weights", Unquantized, "scheme", NONE)
Drawn = counting("Drawn", DefaultSampler, "draw", DEFAULT)
Order = counting("Order", Fcfs, "order", FCFS)
One = counting("One", Single, "start", SINGLE)


class Raises(Lru):
    def figures(self):
        raise RuntimeError("boom")


class NoNumber(Fcfs):
    def figures(self):
        return {"x": "many"}


class TooMany(NGram):
    spec = replace(NGRAM, impl="own_figures:TooMany")

    def figures(self):
        return {f"a{i}": i for i in range(65)}


class NotFinite(Sdpa):
    spec = replace(SDPA, impl="own_figures:NotFinite")

    def figures(self):
        return {"x": float("inf")}
"""
BASE = dict(model="pocket", dtype="float32", device="cpu", num_kvcache_blocks=64, max_num_seqs=4)
EACH = dict(
    attention="own_figures:Attention",
    drafter="own_figures:Draft",
    evictor="own_figures:Evict",
    kv_format="own_figures:Kept",
    quantizer="own_figures:Weights",
    sampler="own_figures:Drawn",
    scheduler="own_figures:Order",
    processors=["own_figures:Penalty"],
    strategies=["own_figures:One"],
)
NAMES = {
    "attention", "drafter", "evictor", "kvformat", "quantizer", "sampler", "sampler host", "scheduler", "model",
    "processor:local/own_figures:Penalty", "processor:local/own_figures:Penalty host", "strategy:local/own_figures:One",
    "executor",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_figures.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_figures", None)
    yield
    sys.modules.pop("own_figures", None)


def served(**options):
    """Return the statistics of an engine after two requests."""
    with LLM(**BASE, allow_targets=["own_figures"], **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, presence_penalty=0.1)
        llm.generate(["a b c a b c a b c"] * 2, params, use_tqdm=False)
        if "grammar" in options:
            assert llm.engine.grammars.plugin is not None  # made on a thread of its own
        return llm.stats()


def test_plug_ins_of_every_seam_have_figures(monkeypatch):
    monkeypatch.setattr(Qwen3, "figures", lambda self: {"layers": 8}, raising=False)
    stats = served(**EACH, executor="own_figures:Here")
    assert set(stats["figures"]) == NAMES and not stats["figure_failures"]
    counted = {name for name, found in stats["figures"].items() if found.get("calls", 1) > 0}
    elsewhere = {"sampler host", "processor:local/own_figures:Penalty", "drafter"}  # drafts stop where they do not pay
    assert NAMES - counted <= elsewhere, "each counts where it is called"


@pytest.mark.slow  # a record hashes sources and the model
def test_a_record_has_the_figures_of_the_worker_s_plug_ins():
    with LLM(**BASE, allow_targets=["own_figures"], sampler="own_figures:Drawn") as llm:
        llm.generate(["a b c"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert llm.bill_of_materials()["results"]["stats"]["figures"]["sampler"]["calls"] > 0


def test_a_grammar_has_figures_once_it_is_made():
    pytest.importorskip("llguidance")
    assert "grammar" in served(grammar="own_figures:Words")["figures"]


@pytest.mark.slow
def test_figures_come_from_a_worker_process_and_the_last_stand_when_it_has_ended():
    with LLM(**BASE, allow_targets=["own_figures"], **EACH, executor="own_figures:There") as llm:
        llm.generate(["a b c a b c a b c"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        stats = llm.stats()
        assert set(stats["figures"]) == NAMES - {"model"}
        assert stats["figures"]["attention"]["calls"] > 0 < stats["figures"]["kvformat"]["calls"]
        engine = llm.engine
    assert engine.stats()["figures"]["attention"]["calls"] >= stats["figures"]["attention"]["calls"]


def test_figures_that_cannot_be_had_are_reported_and_end_nothing(caplog):
    with caplog.at_level(logging.WARNING, "minivllm"):
        stats = served(
            evictor="own_figures:Raises",
            scheduler="own_figures:NoNumber",
            drafter="own_figures:TooMany",
            attention="own_figures:NotFinite",
            sampler="own_figures:Drawn",
        )
    assert (
        "boom" in stats["figure_failures"]["evictor"]
        and "expected a finite number" in stats["figure_failures"]["scheduler"]
    )
    assert "at most 64 names" in stats["figure_failures"]["drafter"]
    assert "expected a finite number" in stats["figure_failures"]["attention"]
    assert stats["figures"]["sampler"]["calls"] > 0 and stats["finished"] == 2
    logged = [record for record in caplog.records if "failed in figures()" in record.getMessage()]
    assert len(logged) == 4, "each is logged once, however often it is asked"


def test_an_executor_that_does_not_know_the_verb_and_ranks_after_the_first():
    def unknown(verb):
        raise NotImplementedError(verb)

    figures, stats = PluginFigures(), {}
    figures.worker(unknown)
    figures.add_to(stats)
    assert stats == {"figures": {}, "figure_failures": {}}
    figures.worker(lambda verb: [{"name": "attention", "figures": {"n": i}} for i in (1, 2)])
    figures.add_to(stats)
    assert flat(stats) == {"attention.n": 1, "attention rank 1.n": 2}
    row = {"figure a.b": 2.0, "band": {"figure a.b": [1.0, 3.0]}, "other": 1}
    assert text(row) == "a.b 2 [1, 3]"


@pytest.mark.slow
def test_compare_replay_simulate_and_the_report_show_figures(tmp_path, capsys):
    allow = ["--allow-target", "own_figures"]
    trace = ["synthetic:requests=8,question=20,answer=8,node=10,longest=200", "--blocks", "50%"]
    code, out, err = run_cli(
        capsys, "replay", *trace, *allow, "--evictor", "lru,own_figures:Evict", "--output-json", "r.json"
    )
    assert code == 0, err
    assert "figures of defaults fcfs local/own_figures:Evict: evictor.calls" in out and out.count("figures of") == 1
    (tmp_path / "costs.json").write_text(json.dumps(COSTS.as_json()))
    given = ["--trace", "synthetic:like=pocket,requests=8", "--costs", "costs.json", "--set", "max_num_seqs=8"]
    code, out, err = run_cli(
        capsys, "simulate", *given, *allow, "--evictor", "own_figures:Evict", "--output-json", "s.json"
    )
    assert code == 0 and "fcfs local/own_figures:Evict: evictor.calls" in out, err
    few = ["--num-prompts", "3", "--input-len", "9", "--output-len", "6", "--seeds", "1", "--warmups", "0"]
    few += ["--quality-tokens", "0", "--output-json", "c.json", "--set", "num_kvcache_blocks=64"]
    sweep = ["--sweep", "drafter=ngram,own_figures:Draft", "--set", "dtype=float32"]
    code, out, err = run_cli(capsys, "compare", *sweep, *few, *allow)
    assert code == 0, err
    assert "counted of drafter=own_figures:Draft: drafter.calls" in out or "drafter.share 0.500" in out
    found = json.loads((tmp_path / "c.json").read_text())
    assert "draft_acceptance" in found["rows"][0] and found["rows"][1]["figure drafter.share"] == 0.5
    code, _, _ = run_cli(capsys, "report", "r.json", "s.json", "c.json", "-o", "all.html")
    page = (tmp_path / "all.html").read_text()
    assert code == 0 and page.count("figure of a plug-in") == 3
