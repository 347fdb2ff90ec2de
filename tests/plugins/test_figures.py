"""Figures that plug-ins add to ``stats()``, records and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest

from minivllm import LLM, SamplingParams
from minivllm.core import checks
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.frontend.record.diff import compare
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.registration.spec import Spec
from minivllm.runtime.hooks import Hooks, hookimpl
from minivllm.runtime.hooks.figures import PluginFigures
from minivllm.server.metrics import Metrics

OPTIONS = {"model": "pocket", "device": "cpu", "max_model_len": 64, "num_kvcache_blocks": 40}
SHORT = SamplingParams(max_tokens=4, temperature=0)


class Counting(Fcfs):
    """Counts the sequences that arrive.  The test sets its figures."""

    spec = Spec(f"{__name__}:Counting", (1, 1), "a policy of a test")
    came, gives = 0, None

    def key(self, new):
        self.came += len(new)
        return super().key(new)

    def figures(self):
        return {"came": self.came} if self.gives is None else self.gives()


class CountingEvictor(Lru):
    spec = Spec(f"{__name__}:CountingEvictor", (1, 1), "an evictor of a test")
    added = 0

    def add(self, keys, info):
        self.added += len(keys)
        super().add(keys, info)

    def figures(self):
        return {"added": self.added}


class CountingHooks(Hooks):
    spec = Spec(f"{__name__}:CountingHooks", (1, 2), "hooks of a test")
    requests = 0

    @hookimpl
    def minivllm_request_added(self, request):
        self.requests += 1

    @hookimpl
    def minivllm_figures(self):
        return {"requests": self.requests}


NAMED = {
    "allow_targets": [__name__],
    "scheduler": f"{__name__}:Counting",
    "evictor": f"{__name__}:CountingEvictor",
    "hooks": [f"{__name__}:CountingHooks"],
}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setattr(Counting, "gives", None)


def test_figures_of_policy_evictor_and_hooks_are_in_stats_and_in_the_record(tmp_path):
    with LLM(**OPTIONS, **NAMED, record=tmp_path / "run.json") as llm:
        llm.generate(["One day", "Once upon a time there was a little dog who"], SHORT, use_tqdm=False)
        figures = llm.stats()["figures"]
    assert figures["scheduler"] == {"came": 2}
    assert figures["evictor"]["added"] > 0
    (hooks,) = [found for name, found in figures.items() if name.startswith("hooks:")]
    assert hooks == {"requests": 2}
    recorded = json.loads((tmp_path / "run.json").read_text())["results"]["stats"]
    assert recorded["figures"] == figures and recorded["figure_failures"] == {}


def test_an_asynchronous_engine_gives_them_too():
    async def run():
        llm = AsyncLLM(**OPTIONS, **NAMED)
        try:
            async for _ in llm.generate("One day", SHORT):
                pass
            return (await llm.stats())["figures"]["scheduler"]
        finally:
            llm.close()

    assert asyncio.run(run()) == {"came": 1}


def test_plugins_without_figures_take_no_place():
    with LLM(**OPTIONS, scheduler="fcfs", evictor="lru") as llm:
        assert llm.stats()["figures"] == {} and llm.stats()["figure_failures"] == {}


def exits():
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (lambda: 3, "its figures are 3; expected a mapping"),
        (lambda: {"Came": 1}, "a figure is named 'Came'; expected up to 64 lower-case"),
        (lambda: {3: 1}, "a figure is named 3; expected"),
        (lambda: {"came": "1"}, "its figure came is '1'; expected a finite number"),
        (lambda: {"came": float("nan")}, "its figure came is nan; expected a finite number"),
        (lambda: {"came": 10**400}, "OverflowError"),
        (lambda: {f"a{i}": i for i in range(65)}, "expected a mapping of at most 64 names"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (exits, "SystemExit: 3"),
    ],
)
def test_figures_that_cannot_be_had_cost_nothing_but_themselves(monkeypatch, caplog, gives, words):
    monkeypatch.setattr(Counting, "gives", staticmethod(gives))
    with LLM(**OPTIONS, **NAMED) as llm, caplog.at_level(logging.WARNING, "minivllm"):
        (out,) = llm.generate(["One day"], SHORT, use_tqdm=False)
        stats = llm.stats()
        again = llm.stats()
    assert out.outputs[0].finish_reason == "length"
    assert "scheduler" not in stats["figures"] and stats["figures"]["evictor"]
    assert words in stats["figure_failures"]["scheduler"]
    assert again["figure_failures"] == stats["figure_failures"]
    assert len([r for r in caplog.records if "scheduler failed in figures()" in r.getMessage()]) == 1


class WordsForNumbers(Hooks):
    spec = Spec(f"{__name__}:WordsForNumbers", (1, 2), "hooks of a test")

    @hookimpl
    def minivllm_figures(self):
        return {"state": "running"}


def test_figures_of_a_hook_that_fail_count_as_its_failures_and_after_three_it_is_disabled():
    with LLM(**OPTIONS, allow_targets=[__name__], hooks=[f"{__name__}:WordsForNumbers"]) as llm:
        counts = []
        for _ in range(5):
            stats = llm.stats()
            assert stats["figures"] == {}
            counts += stats["hook_failures"].values()
    assert counts == [1, 2, 3, 3, 3]


def test_a_comparison_of_two_records_shows_the_figures_that_differ(tmp_path):
    for name, prompts in (("a", ["One day"]), ("b", ["One day", "Once upon"])):
        with LLM(**OPTIONS, **NAMED, record=tmp_path / f"{name}.json") as llm:
            llm.generate(prompts, SHORT, use_tqdm=False)
    a, b = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    assert ("figures.scheduler.came", 1, 2) in compare(a, b).results


def test_a_later_evictor_has_its_number_in_the_name():
    figures, stats = PluginFigures(), {}
    for _ in range(3):
        figures.of("evictor", CountingEvictor(None, None))
    figures.add_to(stats)
    assert list(stats["figures"]) == ["evictor", "evictor:1", "evictor:2"]


def test_numbers_of_numpy_become_those_of_python():
    import numpy as np

    found = checks.figures({"a": np.int32(3), "b": np.float32(0.5), "c": True})
    assert json.loads(json.dumps(found)) == {"a": 3, "b": 0.5, "c": 1}


def test_metrics_show_the_figures_of_now_and_none_that_is_gone():
    from types import SimpleNamespace

    metrics = Metrics("m", SimpleNamespace(selections={}, kv_tokens=1))
    stats = dict.fromkeys(("running", "waiting", "blocks_total", "blocks_free", "blocks_cached"), 0)
    stats |= {f"{part}_ms": 0.0 for part in ("plan", "submit", "wait", "publish")} | {"seam_ms": {}}
    text = metrics.text({**stats, "figures": {"scheduler": {"came": 2}, "evictor": {"added": 1.5}}}).decode()
    assert re.search(r'minivllm:plugin_figure\{[^}]*figure="came"[^}]*seam="scheduler"[^}]*\} 2\.0', text)
    text = metrics.text({**stats, "figures": {"evictor": {"added": 2.5}}}).decode()
    assert "came" not in text and re.search(r'figure="added"[^}]*\} 2\.5', text)
