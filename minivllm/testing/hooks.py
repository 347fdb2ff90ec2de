"""The conformance suite of hooks plug-ins, which an engine calls at events such as the end of a step.

The hooks run in an engine that preempts, evicts, aborts and has a failing step.  They must accept every call, change
no token and release their threads.
"""

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

STEP_MS = 1.0  # allowed time of a plug-in per step, as a median, in milliseconds


class HooksConformance(Lasting, SpecConformance):
    """The conformance suite of hooks plug-ins.

    Each test runs in an empty folder.  Set ``options`` if the plug-in has options without a default.
    """

    kind = "hooks"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options: none."""
        return ()

    def exercise(self, instance: Hooks) -> Any:
        """Serve requests in an engine with the plug-in and return their outputs."""
        engine = self.engine(instance)
        requests = self.busy(engine)
        engine.stop()
        return [outputs(r) for r in requests]

    def lasting(self) -> Hooks:
        """Create the instance of the leak test, which one engine uses until ``let_go``."""
        instance = self.build()
        self._engine = self.engine(instance)
        return instance

    def once_more(self, instance: Hooks, number: int) -> None:
        """Serve requests with new names, tenants and tokens, and abort one of them."""
        rng = np.random.default_rng(number)
        for i, n in enumerate((3, 9, 9)):
            prompt = rng.integers(0, VOCAB, n)
            request(self._engine, f"{number}-{i}", prompt, tenant=f"t{number}", max_tokens=2 + n, n=1 + i % 2)
        self._engine.step()
        self._engine.abort(f"{number}-1")
        run(self._engine)

    def let_go(self, instance: Hooks) -> None:
        """Stop the engine that ``lasting`` has started."""
        self._engine.stop()

    def manager(self, instance: Hooks | None = None) -> HookManager:
        """Return a hook manager with ``instance``, or with a new instance of the plug-in."""
        plugins = [(self.subject.entry.label, instance or self.build())]
        return HookManager(plugins)

    def engine(self, instance: Hooks | None = None, **options: Any) -> Engine:
        """Start a small simulated engine with an instance of the plug-in, which is made unless one is given."""
        manager = self.manager(instance)
        engine = sim_engine(slots=4, blocks=26, windows=(None, 8), depth=1, budget=16, **options)
        EngineHooks(manager, {"executor": "sim/sim"}, engine).started()
        return engine

    def busy(self, engine: Engine) -> list[Any]:
        """Serve requests that share prefixes and need more memory than the engine has, and return them.

        One request is aborted, and one step fails.
        """
        rng = random.Random(0)
        shared = [rng.randrange(VOCAB) for _ in range(16)]
        requests = []
        for i in range(12):
            prefix = shared[: rng.randrange(4, 16)]
            own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
            prompt = prefix + own
            n = 2 if i == 5 else 1
            added = request(engine, f"r{i}", prompt, max_tokens=rng.randrange(2, 40), n=n)
            requests.append(added)
        engine.executor.fail_at = {25}  # type: ignore[attr-defined]
        for _ in range(9):
            engine.step()
        engine.abort("r2")
        run(engine)
        engine.reset_prefix_cache()
        return requests

    @since(1, 0)
    def test_it_has_hooks_and_the_engine_takes_them(self) -> None:
        """Check that the plug-in has at least one hook, and that ``HookContracts`` declares each of its hooks with the
        same name, arguments and kind (wrapper or not)."""
        try:
            manager = self.manager()
        except PluginError as exc:
            pytest.fail(f"it cannot be registered: {exc}")
        assert manager.listens(*NAMES), f"it has no hook: expected at least one of {', '.join(NAMES)}"

    @since(1, 0)
    def test_nothing_is_raised_whatever_happens_in_the_engine(self) -> None:
        """Check that no hook raises in an engine that preempts, evicts, aborts and has a failing step.

        An engine disables a plug-in that raises three times, so that the user loses its function.
        """
        engine = self.engine()
        self.busy(engine)
        stats = engine.stats()
        seen = Seen(preempted=stats["preemptions"], evicted=stats["evictions"])
        engine.stop()
        failures = engine.stats()["hook_failures"]
        assert not any(failures.values()), f"it raised {sum(failures.values())} times (the log has the errors)"
        seen.require(preempted=1, evicted=1)

    @since(1, 0)
    def test_the_tokens_are_those_of_an_engine_without_it(self) -> None:
        """Check that requests get the same tokens with and without the plug-in, which may only observe."""
        without = sim_engine(slots=4, blocks=26, windows=(None, 8), depth=1, budget=16)
        expected = [outputs(r) for r in self.busy(without)]
        assert self.exercise(self.build()) == expected

    @since(1, 0)
    def test_making_it_takes_nothing(self) -> None:
        """Check that the constructor starts no thread and writes no file.

        The engine also creates instances that it only reads, so files, threads and terminals are opened in
        ``engine_started``.
        """
        threads = set(threading.enumerate())
        before = sorted(os.listdir())
        self.build()
        more = [thread.name for thread in threading.enumerate() if thread not in threads]
        assert not more, f"the constructor started a thread: {more}"
        assert sorted(os.listdir()) == before, f"the constructor wrote {sorted(set(os.listdir()) - set(before))}"

    @since(1, 0)
    def test_an_engine_that_stops_leaves_no_thread_of_its_behind(self) -> None:
        """Check that the threads of the plug-in end with the engine, whether or not the engine has run a step.

        Stopping an engine twice calls ``engine_stopped`` once.
        """
        threads = set(threading.enumerate())
        for runs_steps in (False, True):
            engine = self.engine()
            if runs_steps:
                self.busy(engine)
            engine.stop()
            engine.stop()
            new = [thread for thread in threading.enumerate() if thread not in threads]
            for thread in new:
                thread.join(1.0)  # a thread that received a stop signal may need a moment to end
            alive = [thread.name for thread in new if thread.is_alive()]
            assert not alive, f"threads a second after engine_stopped: {', '.join(alive)}"
            assert not any(engine.stats()["hook_failures"].values()), "it raised (the log has the errors)"

    @since(1, 0)
    def test_a_step_waits_less_than_a_millisecond_for_it(self) -> None:
        """Check that the hooks take less than a millisecond per step, because every request waits for them."""
        engine = self.engine()
        self.busy(engine)
        engine.stop()
        clock = engine.clock
        spent = [column for name, column in clock.seam.items() if name.startswith("hooks:")]
        if spent:
            ms = 1e3 * float(np.median(sum(spent)[: clock.count]))
        else:
            ms = 0.0
        assert ms < STEP_MS, (
            f"half of the steps spent {ms:.2f} ms or more in its hooks: expected less than {STEP_MS} ms"
        )
