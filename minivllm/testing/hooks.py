"""Hooks in an engine that preempts, evicts, aborts and fails: they hear it all, harm nothing, and give back what they
took."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.core.engine.engine import Engine
from minivllm.errors import PluginError
from minivllm.runtime.hooks import Hooks
from minivllm.runtime.hooks.bridge import EngineHooks
from minivllm.runtime.hooks.manager import NAMES, HookManager

from .base import Seen, since
from .kept import Lasting
from .sim import VOCAB, outputs, request, run, sim_engine
from .spec import SpecConformance

STEP_MS = 1.0  # that a plug-in may take of a step, in the median


class HooksConformance(Lasting, SpecConformance):
    """Each test runs in an empty folder.  Set ``options`` if the plug-in has options without a default."""

    kind = "hooks"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def context(self) -> tuple[Any, ...]:
        return ()

    def exercise(self, instance: Hooks) -> Any:
        engine = self.engine(instance)
        made = self.busy(engine)
        engine.stop()
        return [outputs(r) for r in made]

    def lasting(self) -> Hooks:
        """Make an instance that one engine keeps for good."""
        instance = self.build()
        self._engine = self.engine(instance)
        return instance

    def once_more(self, instance: Hooks, number: int) -> None:
        """Serve requests with names, tenants and tokens that have not been there before; one is aborted."""
        rng = np.random.default_rng(number)
        for i, n in enumerate((3, 9, 9)):
            prompt = rng.integers(0, VOCAB, n)
            request(self._engine, f"{number}-{i}", prompt, tenant=f"t{number}", max_tokens=2 + n, n=1 + i % 2)
        self._engine.step()
        self._engine.abort(f"{number}-1")
        run(self._engine)

    def let_go(self, instance: Hooks) -> None:
        self._engine.stop()

    def manager(self, instance: Hooks | None = None) -> HookManager:
        return HookManager([(self.subject.entry.label, instance or self.build())])

    def engine(self, instance: Hooks | None = None, **options: Any) -> Engine:
        """A small engine that is started with the plug-in."""
        manager = self.manager(instance)
        engine = sim_engine(slots=4, blocks=26, windows=(None, 8), depth=1, budget=16, **options)
        EngineHooks(manager, {"executor": "sim/sim"}, engine).started()
        return engine

    def busy(self, engine: Engine) -> list[Any]:
        """Requests that share prefixes, more than there is memory for; one is aborted, a step fails."""
        rng = random.Random(0)
        shared = [rng.randrange(VOCAB) for _ in range(16)]
        made = []
        for i in range(12):
            prompt = shared[: rng.randrange(4, 16)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
            made.append(request(engine, f"r{i}", prompt, max_tokens=rng.randrange(2, 40), n=1 + (i == 5)))
        engine.executor.fail_at = {25}  # type: ignore[attr-defined]
        for _ in range(9):
            engine.step()
        engine.abort("r2")
        run(engine)
        engine.reset_prefix_cache()
        return made

    @since(1, 0)
    def test_it_has_hooks_and_the_engine_takes_them(self) -> None:
        """Names, arguments and kinds (wrapper or not) are those of ``HookContracts``."""
        try:
            manager = self.manager()
        except PluginError as exc:
            pytest.fail(f"it cannot be registered: {exc}")
        assert manager.listens(*NAMES), f"it has no hook: want at least one of {', '.join(NAMES)}"

    @since(1, 0)
    def test_nothing_is_raised_whatever_happens_in_the_engine(self) -> None:
        """A plug-in that raises three times is disabled, and the user goes without what was asked for."""
        engine, seen = self.engine(), Seen()
        self.busy(engine)
        seen["preempted"], seen["evicted"] = engine.stats()["preemptions"], engine.stats()["evictions"]
        engine.stop()
        failures = engine.stats()["hook_failures"]
        assert not any(failures.values()), f"it raised {sum(failures.values())} times (the log says where)"
        seen.require(preempted=1, evicted=1)

    @since(1, 0)
    def test_the_tokens_are_those_of_an_engine_without_it(self) -> None:
        """It observes; what is generated is not its business."""
        bare = sim_engine(slots=4, blocks=26, windows=(None, 8), depth=1, budget=16)
        want = [outputs(r) for r in self.busy(bare)]
        assert self.exercise(self.build()) == want

    @since(1, 0)
    def test_making_it_takes_nothing(self) -> None:
        """It is made once more where first-result hooks are asked: files, threads and terminals wait for
        ``engine_started``."""
        threads, before = set(threading.enumerate()), sorted(os.listdir())
        self.build()
        more = [thread.name for thread in threading.enumerate() if thread not in threads]
        assert not more, f"making it started a thread: {more}"
        assert sorted(os.listdir()) == before, f"making it wrote {sorted(set(os.listdir()) - set(before))}"

    @since(1, 0)
    def test_an_engine_that_stops_leaves_no_thread_of_its_behind(self) -> None:
        """With or without a step in between; stopping twice is told once."""
        threads = set(threading.enumerate())
        for works in (False, True):
            engine = self.engine()
            if works:
                self.busy(engine)
            engine.stop()
            engine.stop()
            new = [t for t in threading.enumerate() if t not in threads]
            for t in new:
                t.join(1.0)  # one that was told to end may need a moment
            left = [t.name for t in new if t.is_alive()]
            assert not left, f"threads a second after engine_stopped: {', '.join(left)}"
            assert not any(engine.stats()["hook_failures"].values()), "it raised (the log says where)"

    @since(1, 0)
    def test_a_step_waits_less_than_a_millisecond_for_it(self) -> None:
        """Hooks run within the step, so every request waits for them."""
        engine = self.engine()
        self.busy(engine)
        engine.stop()
        clock = engine.clock
        spent = [column for name, column in clock.seam.items() if name.startswith("hooks:")]
        ms = 1e3 * float(np.median(sum(spent)[: clock.count])) if spent else 0.0
        assert ms < STEP_MS, f"half of the steps took {ms:.2f} ms or more in it: want less than {STEP_MS} ms"
