"""Wrong hooks, and right ones of every kind."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque

from minivllm.registration.spec import Spec
from minivllm.runtime.hooks import Hooks, hookimpl

SEAM = "hooks"
TAKEN = "test_it_has_hooks_and_the_engine_takes_them"
RAISES = "test_nothing_is_raised_whatever_happens_in_the_engine"
STOPS = "test_an_engine_that_stops_leaves_no_thread_of_its_behind"
KEPT = "test_what_has_ended_leaves_nothing_behind"
FAULTS = {
    "Misspelt": (TAKEN,),
    "WritesToAView": (RAISES,),
    "LeavesAThread": (STOPS,),
    "WorksWhenMade": ("test_making_it_takes_nothing",),
    "Sleeps": ("test_a_step_waits_less_than_a_millisecond_for_it",),
    "WantsWhatNobodyTells": (TAKEN,),
    "WithoutAMark": (TAKEN,),
    "WrapsAnObserver": (TAKEN,),
    "FiguresOfWords": (RAISES,),
    "NoYield": (RAISES,),
    "YieldsTwice": (RAISES,),
    "NoHooks": (TAKEN,),
    "ThinksThatRequestsHaveOneSequence": (RAISES,),
    "ThinksThatEveryTurnHasAStep": (RAISES,),
    "WaitsForAStep": (STOPS,),
    "SharesItsList": ("test_two_instances_share_no_state",),
    "NamesForGood": (KEPT,),
    "TenantsForGood": (KEPT,),
}
RIGHT = ("Counter", "Tracer", "Mirror")


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault")


class Misspelt(Hooks):
    spec = spec("Misspelt")

    @hookimpl
    def minivllm_step_ended(self, step):
        pass


class WritesToAView(Hooks):
    """Would make the engine's token another one."""

    spec = spec("WritesToAView")

    @hookimpl
    def minivllm_step_finished(self, step):
        step.token[:1] = 0


class LeavesAThread(Hooks):
    spec = spec("LeavesAThread")

    @hookimpl
    def minivllm_engine_started(self):
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()


class WorksWhenMade(Hooks):
    spec = spec("WorksWhenMade")

    def __init__(self, options=None):
        super().__init__(options)
        file, _ = tempfile.mkstemp(prefix="made-", suffix=".log", dir=os.getcwd())
        os.close(file)

    @hookimpl
    def minivllm_engine_started(self):
        pass


class Sleeps(Hooks):
    spec = spec("Sleeps")

    @hookimpl
    def minivllm_step_finished(self):
        time.sleep(0.0015)


class WantsWhatNobodyTells(Hooks):
    spec = spec("WantsWhatNobodyTells")

    @hookimpl
    def minivllm_step_finished(self, stats):
        pass


class WithoutAMark(Hooks):
    spec = spec("WithoutAMark")

    @hookimpl
    def minivllm_step_finished(self):
        pass

    def minivllm_engine_stopped(self):
        pass


class WrapsAnObserver(Hooks):
    spec = spec("WrapsAnObserver")

    @hookimpl(wrapper=True)
    def minivllm_step_finished(self):
        yield


class NoYield(Hooks):
    spec = spec("NoYield")

    @hookimpl(wrapper=True)
    def minivllm_publish(self, step):
        if step.rows > 100:
            yield


class YieldsTwice(Hooks):
    spec = spec("YieldsTwice")

    @hookimpl(wrapper=True)
    def minivllm_publish(self):
        yield
        yield


class NoHooks(Hooks):
    spec = spec("NoHooks")


class ThinksThatRequestsHaveOneSequence(Hooks):
    spec = spec("ThinksThatRequestsHaveOneSequence")

    @hookimpl
    def minivllm_request_added(self, request):
        (self.sequence,) = request.sequences


class ThinksThatEveryTurnHasAStep(Hooks):
    spec = spec("ThinksThatEveryTurnHasAStep")

    @hookimpl(wrapper=True)
    def minivllm_plan_and_submit(self):
        step = yield
        self.rows = step.rows


class WaitsForAStep(Hooks):
    """Stops its clock in the first step that comes after the start, if one comes."""

    spec = spec("WaitsForAStep")

    @hookimpl
    def minivllm_engine_started(self):
        self.timer = threading.Timer(3.0, print)
        self.timer.daemon = True
        self.timer.start()

    @hookimpl
    def minivllm_step_finished(self):
        self.timer.cancel()


class SharesItsList(Hooks):
    spec = spec("SharesItsList")
    rows: list = []

    @hookimpl
    def minivllm_step_finished(self, step):
        self.rows.append(step.rows)


class Counter(Hooks):
    """Right.  It counts."""

    spec = spec("Counter")
    tokens = 0

    @hookimpl
    def minivllm_step_finished(self, step):
        self.tokens += int(step.count.sum())


class Tracer(Hooks):
    """Right.  It times the halves of a turn."""

    spec = spec("Tracer")

    def __init__(self, options=None):
        super().__init__(options)
        self.spans = deque(maxlen=100)

    @hookimpl(wrapper=True)
    def minivllm_plan_and_submit(self, turn):
        start = time.perf_counter()
        step = yield
        self.spans.append((turn, step and step.id, time.perf_counter() - start))

    @hookimpl(wrapper=True)
    def minivllm_publish(self, step):
        try:
            yield
        finally:
            self.spans.append((step.id, step.tokens))


class Mirror(Hooks):
    """Right.  It keeps the keys in the prefix cache, for each KV group."""

    spec = spec("Mirror")

    def __init__(self, options=None):
        super().__init__(options)
        self.keys = {}

    @hookimpl
    def minivllm_stored(self, blocks):
        keys = self.keys.setdefault(blocks.group, set())
        assert keys.isdisjoint(blocks.keys.tolist())
        keys.update(blocks.keys.tolist())

    @hookimpl
    def minivllm_removed(self, blocks):
        for key in blocks.keys.tolist():
            self.keys[blocks.group].remove(key)


class FiguresOfWords(Hooks):
    """Its figures are no numbers."""

    spec = spec("FiguresOfWords")

    @hookimpl
    def minivllm_figures(self):
        return {"state": "running"}


class NamesForGood(Hooks):
    """Keeps the end of every request that there ever was."""

    spec = spec("NamesForGood")

    def __init__(self, options=None):
        self.ended = {}

    @hookimpl
    def minivllm_request_finished(self, request, end):
        self.ended[request.id] = sum(end.tokens)


class TenantsForGood(Hooks):
    """Counts the requests of every tenant that there ever was."""

    spec = spec("TenantsForGood")

    def __init__(self, options=None):
        self.count = {}

    @hookimpl
    def minivllm_request_added(self, request):
        tenant = request.params["tenant"]
        self.count[tenant] = self.count.get(tenant, 0) + 1
