"""Wrong executors, which are ``Local`` with one fault each, and a right one that differs from it."""

from __future__ import annotations

import queue
import tempfile
import threading
from dataclasses import replace

import numpy as np
import torch

from minivllm.core.interfaces.executor import Executor
from minivllm.core.interfaces.plan import OVERSHOOT, StepError
from minivllm.plugins.executor.local import Local
from minivllm.registration.spec import ANY, Spec

SEAM = "executor"
ORDER = "test_results_come_in_order_of_submission_each_once"
CAPACITY = "test_the_capacity_is_true"
LATE = "test_a_late_step_waits_for_its_masks_and_keeps_its_place"
HOST = "test_a_host_row_gives_its_logits_and_takes_its_token_later"
STEP = "test_a_step_that_fails_is_a_value_and_the_next_one_works"
ROWS = "test_a_processor_that_raises_fails_its_rows_as_a_value"
STOP = "test_stop_gives_everything_back_whenever_it_comes"
START = "test_a_start_that_fails_says_why_and_takes_nothing"
ALIVE = "test_alive_is_true_between_start_and_stop"
ENDED = "test_a_row_that_ended_on_the_device_does_nothing_more"
HANDS = "test_a_slot_may_change_hands_while_steps_are_in_flight"
TOKENS = "test_tokens_are_those_of_transformers"
TWO = "test_two_of_them_live_side_by_side"
ENGINE = "test_the_engine_serves_with_it"
FAULTS = {
    "LastFirst": (ORDER,),
    "DropsOne": (ORDER,),
    "GivesTwice": (ORDER,),
    "OneAtATime": (ORDER,),
    "RaisesOnFailure": (STEP, ENGINE),
    "RaisesInCollect": (STEP, ROWS),
    "LosesTheName": (STEP, ROWS),
    "LosesTheWords": (STEP, ROWS),
    "EveryFaultIsTheSteps": (ROWS, ENGINE),
    "CountsOvershoot": (ENDED,),
    "CountsHostRows": (HOST,),
    "ForgetsLogits": (HOST,),
    "IgnoresMasks": (LATE,),
    "AnswersPastTheLate": (LATE,),
    "OneMask": (LATE,),
    "WideMasks": (LATE,),
    "OneBlockTooMany": (CAPACITY,),
    "RunsTooFarAhead": (CAPACITY,),
    "CountsOneLayer": (CAPACITY,),
    "ForgetsToLeave": (HANDS,),
    "AlwaysAlive": (ALIVE, START),
    "NeverAlive": (ALIVE,),
    "AnyVerb": ("test_a_verb_that_it_does_not_know_is_named",),
    "RawErrors": (START,),
    "LeavesAThread": (STOP,),
    "LeavesAFile": (STOP,),
    "StopsOnce": (STOP,),
    "StopWaitsForMasks": (STOP,),
    "LeavesAProfile": (STOP,),
    "OneForAll": (TWO,),
    "WrongSampleRow": (TOKENS, ENGINE),
}
RIGHT = ("InAThread",)


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (2, 0), "a planted fault", limits={"device": ANY, "tensor_parallel_size": {1}})


class Edited(Local):
    """Changes results on their way."""

    def edit(self, result):
        return result

    def collect(self, in_flight):
        return [self.edit(r) for r in super().collect(in_flight)]


class LastFirst(Local):
    spec = spec("LastFirst")

    def collect(self, in_flight):
        return super().collect(in_flight)[::-1]


class DropsOne(Local):
    """A buffer of two results."""

    spec = spec("DropsOne")

    def collect(self, in_flight):
        return super().collect(in_flight)[-2:] if len(self._running) > 2 else super().collect(in_flight)


class GivesTwice(Local):
    spec = spec("GivesTwice")

    def collect(self, in_flight):
        if len(self._running) > 3:
            return [self._running[0].result(), *super().collect(in_flight)]
        return super().collect(in_flight)


class OneAtATime(Local):
    """Does not look at how many may remain."""

    spec = spec("OneAtATime")

    def collect(self, in_flight):
        return [self._running.popleft().result()] if self._running and self._running[0].sampled else []


class RaisesOnFailure(Local):
    spec = spec("RaisesOnFailure")

    def submit(self, plan):
        super().submit(plan)
        if self._running[-1].errors:
            raise RuntimeError(self._running[-1].errors[0].message)


class RaisesInCollect(Edited):
    spec = spec("RaisesInCollect")

    def edit(self, result):
        if result.errors:
            raise RuntimeError(result.errors[0].message)
        return result


class LosesTheName(Edited):
    spec = spec("LosesTheName")

    def edit(self, result):
        return replace(result, errors=tuple(replace(e, plugin="") for e in result.errors))


class LosesTheWords(Edited):
    spec = spec("LosesTheWords")

    def edit(self, result):
        return replace(result, errors=tuple(replace(e, message="worker failed") for e in result.errors))


class EveryFaultIsTheSteps(Edited):
    spec = spec("EveryFaultIsTheSteps")

    def edit(self, result):
        return replace(result, errors=tuple(StepError("step", e.plugin, e.message) for e in result.errors))


class CountsOvershoot(Edited):
    """Every row that draws gives a token."""

    spec = spec("CountsOvershoot")

    def edit(self, result):
        return replace(result, count=np.where(result.flags & OVERSHOOT, 1, result.count))


class CountsHostRows(Edited):
    spec = spec("CountsHostRows")

    def edit(self, result):
        return result if result.logits is None else replace(result, count=np.ones_like(result.count))


class ForgetsLogits(Edited):
    spec = spec("ForgetsLogits")

    def edit(self, result):
        return replace(result, logits=None)


class IgnoresMasks(Local):
    spec = spec("IgnoresMasks")

    def supply(self, step, late):
        self.runner.sample(next(r for r in self._running if r.plan.id == step))


class AnswersPastTheLate(Local):
    """Runs and gives the steps behind one that waits for its masks."""

    spec = spec("AnswersPastTheLate")

    def _enqueue(self):
        while self._behind:
            plan = self._behind.popleft()
            running = self.runner.forward(plan)
            if not len(plan.late):
                self.runner.sample(running, None)
            self._running.append(running)

    def collect(self, in_flight):
        done = [r for r in self._running if r.sampled]
        for r in done:
            self._running.remove(r)
        return [r.result() for r in done]


class WideMasks(Local):
    """Its memory for masks is of the wrong type."""

    spec = spec("WideMasks")

    def mask_memory(self, rows, words):
        return np.empty((rows, words), np.int64)


class OneMask(Local):
    """All late rows get the first row's mask."""

    spec = spec("OneMask")

    def supply(self, step, late):
        super().supply(step, replace(late, mask=np.repeat(late.mask[:1], len(late.mask), 0)))


class OneBlockTooMany(Local):
    spec = spec("OneBlockTooMany")

    def start(self, wiring):
        c = super().start(wiring)
        return replace(c, blocks=tuple(n + 1 for n in c.blocks))


class RunsTooFarAhead(Local):
    spec = spec("RunsTooFarAhead")

    def start(self, wiring):
        return replace(super().start(wiring), depth=2)


class CountsOneLayer(Local):
    spec = spec("CountsOneLayer")

    def start(self, wiring):
        c = super().start(wiring)
        return replace(c, block_bytes=tuple(n // 2 for n in c.block_bytes))


class ForgetsToLeave(Local):
    """A slot belongs to its first owner for ever."""

    spec = spec("ForgetsToLeave")

    def submit(self, plan):
        j = plan.delta.join
        if j is not None and hasattr(self, "met") and set(j.slot.tolist()) & self.met:
            plan = replace(plan, delta=replace(plan.delta, join=None))
        self.met = getattr(self, "met", set()) | set(() if j is None else j.slot.tolist())
        super().submit(plan)


class AlwaysAlive(Local):
    spec = spec("AlwaysAlive")

    def alive(self):
        return True


class NeverAlive(Local):
    spec = spec("NeverAlive")

    def alive(self):
        return False


class AnyVerb(Local):
    spec = spec("AnyVerb")

    def call(self, verb, args=None):
        return super().call(verb, args) if verb.startswith("profile") else None


class RawErrors(Local):
    """Errors of the worker are raised unchanged, without the executor's name."""

    spec = spec("RawErrors")

    def start(self, wiring):
        try:
            return super().start(wiring)
        except Exception as e:
            raise OSError(str(e)) from None


class LeavesAThread(Local):
    spec = spec("LeavesAThread")

    def start(self, wiring):
        threading.Thread(target=threading.Event().wait, args=(20.0,), daemon=True, name="watcher").start()
        return super().start(wiring)


class LeavesAFile(Local):
    spec = spec("LeavesAFile")
    kept: list = []

    def start(self, wiring):
        self.kept.append(tempfile.TemporaryFile())  # noqa: SIM115
        return super().start(wiring)


class StopsOnce(Local):
    spec = spec("StopsOnce")

    def stop(self, deadline=10.0):
        self.runner.close()
        super().stop(deadline)


class StopWaitsForMasks(Local):
    """Waits for the steps in flight before it stops."""

    spec = spec("StopWaitsForMasks")

    def stop(self, deadline=10.0):
        if self._running and not all(r.sampled for r in self._running):
            threading.Event().wait(deadline + 2.0)
        super().stop(deadline)


class LeavesAProfile(Local):
    spec = spec("LeavesAProfile")

    def stop(self, deadline=10.0):
        if self.runner is not None and self.runner._profiler is not None:
            self.runner._profiler = None
        super().stop(deadline)


class OneForAll(Local):
    """The last model that was loaded serves everybody."""

    spec = spec("OneForAll")
    last: list = [None]

    def start(self, wiring):
        capacity = super().start(wiring)
        self.last[0] = self.runner
        return capacity

    def submit(self, plan):
        self.runner = self.last[0]
        super().submit(plan)


class WrongSampleRow(Local):
    """Draws from the row that came first in a step of several rows."""

    spec = spec("WrongSampleRow")

    def submit(self, plan):
        forward = self.runner.forward

        def mixed(plan):
            running = forward(plan)
            if running.hidden is not None and len(running.hidden) > 1:
                running.hidden = torch.flip(running.hidden, [0])
            return running

        self.runner.forward = mixed
        try:
            super().submit(plan)
        finally:
            self.runner.forward = forward


class InAThread(Executor):
    """Right.  A separate thread runs the steps, results arrive through a queue, and ``submit`` computes nothing."""

    spec = spec("InAThread")

    def __init__(self, options=None):
        super().__init__(options)
        self.inner, self.thread, self.pending = Local(options), None, 0

    def start(self, wiring):
        capacity = self.inner.start(wiring)
        self.work, self.done = queue.Queue(), queue.Queue()
        self.thread = threading.Thread(target=self._loop, name="steps", daemon=True)
        self.thread.start()
        return capacity

    def _loop(self):
        while (job := self.work.get()) is not None:
            name, args, answer = job
            if name == "stop":
                self.inner.stop()
            else:
                try:
                    value = getattr(self.inner, name)(*args)
                except Exception as e:
                    value = e
                if answer is not None:
                    answer.put(value)
            for result in self.inner.collect(1 << 30):
                self.done.put(result)

    def submit(self, plan):
        self.pending += 1
        self.work.put(("submit", (plan,), None))

    def supply(self, step, late):
        self.work.put(("supply", (step, late), None))

    def collect(self, in_flight):
        out = []
        while self.pending > in_flight or not self.done.empty():
            out.append(self.done.get())
            self.pending -= 1
        return out

    def call(self, verb, args=None):
        answer = queue.Queue()
        self.work.put(("call", (verb, args), answer))
        value = answer.get()
        if isinstance(value, Exception):
            raise value
        return value

    def alive(self):
        return self.thread is not None and self.thread.is_alive()

    def stop(self, deadline=10.0):
        if self.thread is not None:
            self.work.put(("stop", (), None))
            self.work.put(None)
            self.thread.join(deadline)
            self.thread, self.pending = None, 0
        self.inner.stop(deadline)
