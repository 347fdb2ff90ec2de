"""Executors over a device that runs behind the host in steps of a few captured sizes, with one fault each.

The faults occur when a buffer is reused, a pointer is kept, or work is enqueued in a wrong order.  The device is a
queue in which a step runs only when its result is requested.  So each fault is visible on a CPU, while on a GPU it
would depend on timing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import torch

from minivllm.core.interfaces.plan import OVERSHOOT, Delta
from minivllm.device.worker.running import Running
from minivllm.plugins.executor.local import Local
from minivllm.registration.spec import ANY, Spec

SEAM = "executor"
TOKENS = "test_tokens_are_those_of_transformers"
LATE = "test_a_late_step_waits_for_its_masks_and_keeps_its_place"
OWN = "test_each_late_step_draws_under_its_own_masks"
LENT = "test_the_mask_memory_of_one_is_not_anothers"
IDLE = "test_rows_that_are_not_in_a_step_are_left_alone"
TABLE = "test_a_step_reads_the_table_that_came_with_it"
OTHERS = "test_a_row_that_ended_stores_nothing_in_blocks_of_others"
FORK = "test_a_branch_begins_as_its_source_was"
KEPT = "test_kept_columns_of_a_preempted_row_come_back_as_they_were"
LOGPROBS = "test_logprobs_are_those_of_the_rows_that_draw"
STAYS = "test_a_result_stays_as_it_was_handed_over"
PLAN = "test_a_plan_and_its_masks_stay_as_the_host_made_them"
HOST = "test_a_host_row_gives_its_logits_and_takes_its_token_later"
ENDED = "test_a_row_that_ended_on_the_device_does_nothing_more"
FAULTS = {
    "OneMaskBuffer": (OWN,),
    "ClearsMasksLate": (LATE, OWN),
    "MasksOfTheStepBefore": (OWN,),
    "OneMaskMemoryForAll": (LENT,),
    "MasksByPlaceInTheStep": (OWN,),
    "OldTable": (TABLE,),
    "CopiesOneByOne": (TABLE,),
    "PadsWithTheLastSlot": (IDLE,),
    "PadsWithItsLastRow": (IDLE,),
    "OvershootStores": (OTHERS,),
    "ForksLate": (FORK,),
    "ForksNoProcessors": (FORK,),
    "RestoresBeforeTheTokens": (KEPT,),
    "KeepsBehindTheStep": (KEPT,),
    "LeavesBehindTheStep": (TABLE,),
    "HostTokenBehindTheStep": (HOST,),
    "ResultsAreViews": (STAYS,),
    "ResultsOfTheStepBefore": (TOKENS,),
    "FlagsOfTheStepBefore": (ENDED,),
    "LogprobsOfTheFirstRows": (LOGPROBS,),
    "LogprobsOfTheFirstCapture": (LOGPROBS,),
    "WritesIntoThePlan": (PLAN,),
}
RIGHT = ("Queued",)


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (2, 0), "a planted fault", limits={"device": ANY, "tensor_parallel_size": {1}})


class Queued(Local):
    """Right.  A step runs only when its result is requested, and no further step runs with it."""

    spec = spec("Queued")

    def start(self, wiring):
        self.jobs: deque = deque()
        self.left = 0  # number of steps whose results were not returned
        return super().start(wiring)

    def submit(self, plan):
        self.left += 1
        self.jobs.append(lambda: self.run(plan))

    def run(self, plan):
        """On the device."""
        super().submit(plan)

    def supply(self, step, late):
        self.jobs.append(lambda: self.mask(step, late))

    def mask(self, step, late):
        """On the device."""
        super().supply(step, late)

    def collect(self, in_flight):
        out = self.ready()
        while self.jobs and self.left > in_flight:
            self.jobs.popleft()()
            out += self.ready()
        return out

    def ready(self):
        done = [self.edit(result) for result in super().collect(1 << 30)]
        self.left -= len(done)
        return done

    def edit(self, result):
        return result

    def stop(self, deadline=10.0):
        self.jobs = deque()
        super().stop(deadline)


# ---- masks ----------------------------------------------------------------------------------------------------------


class OneMaskBuffer(Queued):
    """Masks are copied when they come, to the one buffer that the draws read later."""

    spec = spec("OneMaskBuffer")

    def start(self, wiring):
        self.buffer = np.zeros((8, 2), np.int32)
        return super().start(wiring)

    def supply(self, step, late):
        n = len(late.mask)
        self.buffer[:n] = late.mask
        super().supply(step, replace(late, mask=self.buffer[:n]))


class ClearsMasksLate(Queued):
    """New memory for masks is cleared on the device, when it gets round to it."""

    spec = spec("ClearsMasksLate")

    def mask_memory(self, rows, words):
        memory = np.zeros((rows, words), np.int32)
        self.jobs.append(lambda: memory.fill(-1))
        return memory


class MasksOfTheStepBefore(Queued):
    """A draw is enqueued before the copy of its masks, so the first one has none."""

    spec = spec("MasksOfTheStepBefore")

    def start(self, wiring):
        self.there = np.full((8, 2), -1, np.int32)
        return super().start(wiring)

    def mask(self, step, late):
        before = self.there.copy()
        self.there[: len(late.mask)] = late.mask
        super().mask(step, replace(late, mask=before[: len(late.mask)]))


class OneMaskMemoryForAll(Queued):
    """The memory for masks is made once in a process."""

    spec = spec("OneMaskMemoryForAll")
    memory = np.zeros((64, 2), np.int32)

    def mask_memory(self, rows, words):
        return self.memory[:rows]


class MasksByPlaceInTheStep(Queued):
    """The rows of the first step's masks are used for the masks of all later steps."""

    spec = spec("MasksByPlaceInTheStep")

    def run(self, plan):
        if len(plan.late):
            places = self.__dict__.setdefault("places", {})
            late = places.setdefault(len(plan.late), plan.late)
            plan = replace(plan, late=late if late.max() < len(plan.samples) else plan.late)
        super().run(plan)


# ---- the table and the cache ----------------------------------------------------------------------------------------


class OldTable(Queued):
    """Decode steps are replays that read a copy of the table, which is made again when a sequence joins."""

    spec = spec("OldTable")

    def run(self, plan):
        state = self.runner.state
        if plan.delta.join is None and hasattr(self, "copy") and (plan.q_len == 1).all():
            state.apply(plan.delta, self.runner.worker.caches)
            now, state.table = state.table, self.copy
            super().run(replace(plan, delta=replace(Delta(), token=plan.delta.token)))
            state.table = now
        else:
            super().run(plan)
            self.copy = state.table.clone()


class CopiesOneByOne(Queued):
    """Blocks are copied one after another, so that a source may have been written already."""

    spec = spec("CopiesOneByOne")

    def run(self, plan):
        for group, source, to in plan.delta.copy.tolist():
            for layer in self.runner.worker.caches[group]:
                for tensor in layer.values():
                    tensor[to] = tensor[source]
        super().run(replace(plan, delta=replace(plan.delta, copy=plan.delta.copy[:0])))


class OvershootStores(Queued):
    """A row that has ended stores its keys in the blocks of its table."""

    spec = spec("OvershootStores")

    def run(self, plan):
        read, state = self.runner.read, self.runner.state

        def stores(plan):
            ended, state.stopped = state.stopped, torch.zeros_like(state.stopped)
            try:
                return read(plan)
            finally:
                state.stopped = ended

        self.runner.read = stores
        try:
            super().run(plan)
        finally:
            self.runner.read = read


# ---- captured sizes -------------------------------------------------------------------------------------------------


class Padded(Queued):
    """Decode steps are filled up to the next power of two."""

    def run(self, plan):
        n = len(plan.slots)
        size = 1 << (n - 1).bit_length() if n else 0
        plain = not any(len(x) for x in (plan.late, plan.host, plan.held, plan.prompt, plan.draft))
        if n < size and plain and (plan.q_len == 1).all() and len(plan.samples) == n:
            self.filled = size - n
            more = self.filling(plan)
            plan = replace(
                plan,
                slots=np.append(plan.slots, more.repeat(self.filled)).astype(np.int32),
                q_len=np.ones(size, np.int32),
                samples=np.arange(size, dtype=np.int32),
                computed=np.append(plan.computed, self.place(plan, more).repeat(self.filled)).astype(np.int32),
            )
            super().run(plan)
            self._running[-1].plan = replace(plan, slots=plan.slots[:n], samples=plan.samples[:n])
            self._running[-1].pick = np.arange(n)
        else:
            super().run(plan)

    def place(self, plan, slot):
        return self.runner.state.known[int(slot[0])].numpy().reshape(1) - 1


class PadsWithTheLastSlot(Padded):
    """Uses the last slot of a sequence as the spare slot for padding."""

    spec = spec("PadsWithTheLastSlot")

    def filling(self, plan):
        return np.array([self.runner.wiring.max_num_seqs - 1])


class PadsWithItsLastRow(Padded):
    """Pads a step with its last row, which then draws twice and counts twice."""

    spec = spec("PadsWithItsLastRow")

    def filling(self, plan):
        return plan.slots[-1:]

    def place(self, plan, slot):
        return plan.computed[-1:]


# ---- columns --------------------------------------------------------------------------------------------------------


class ForksLate(Queued):
    """A branch takes over its source's columns when it runs for the first time."""

    spec = spec("ForksLate")

    def run(self, plan):
        waiting = [*self.__dict__.get("waiting", []), *plan.delta.fork.tolist()]
        due = [f for f in waiting if f[1] in plan.slots]
        self.waiting = [f for f in waiting if f not in due]
        fork = np.array(due, np.int32).reshape(-1, 3)
        super().run(replace(plan, delta=replace(plan.delta, fork=fork)))


class ForksNoProcessors(Queued):
    """A branch gets its source's history, but not the columns of processors."""

    spec = spec("ForksNoProcessors")

    def run(self, plan):
        held = self.runner.state.processors
        columns = [{name: x.clone() for name, x in p.columns.items()} for p in held]
        super().run(plan)
        for _, slot, _ in plan.delta.fork.tolist():
            for p, before in zip(held, columns, strict=True):
                for name, x in p.columns.items():
                    x[slot] = before[name][slot]


class RestoresBeforeTheTokens(Queued):
    """Kept columns come back first, and then hear of the tokens again."""

    spec = spec("RestoresBeforeTheTokens")

    def run(self, plan):
        recommit, restore = self.runner._recommit, self.runner.state.restore

        def first(plan):
            restore(plan.delta.join)
            recommit(plan)

        self.runner._recommit, self.runner.state.restore = first, lambda join: None
        super().run(plan)
        self.runner._recommit, self.runner.state.restore = recommit, restore


class KeepsBehindTheStep(Queued):
    """Columns are put aside behind the step that they came with, when their slot may have its next owner."""

    spec = spec("KeepsBehindTheStep")

    def run(self, plan):
        super().run(replace(plan, delta=replace(plan.delta, keep=plan.delta.keep[:0])))
        self.runner.state.apply(replace(Delta(), keep=plan.delta.keep), self.runner.worker.caches)


class LeavesBehindTheStep(Queued):
    """The slots of leaving rows are sent to the device after the step with which they came."""

    spec = spec("LeavesBehindTheStep")

    def run(self, plan):
        super().run(replace(plan, delta=replace(plan.delta, leave=plan.delta.leave[:0])))
        self.runner.state.apply(replace(Delta(), leave=plan.delta.leave), self.runner.worker.caches)


class HostTokenBehindTheStep(Queued):
    """A token that the host chose is copied to the device behind the step that it came with."""

    spec = spec("HostTokenBehindTheStep")

    def run(self, plan):
        super().run(replace(plan, delta=replace(plan.delta, token=plan.delta.token[:0])))
        self.runner._take_tokens(plan)


# ---- results --------------------------------------------------------------------------------------------------------


class ResultsAreViews(Queued):
    """The arrays that are handed over lie in one piece of memory, to which every step writes its results."""

    spec = spec("ResultsAreViews")

    def edit(self, result):
        memory, n = self.__dict__.setdefault("memory", np.zeros((2, 64), np.int32)), len(result.tokens)
        memory[0, :n], memory[1, :n] = result.tokens, result.count
        return replace(result, tokens=memory[0, :n], count=memory[1, :n])


class ResultsOfTheStepBefore(Queued):
    """Pinned memory is read before the copy to it has run."""

    spec = spec("ResultsOfTheStepBefore")

    def edit(self, result):
        there, self.there = self.__dict__.get("there", np.zeros(0, np.int32)), result.tokens
        fits = len(there) == len(result.tokens)
        return replace(result, tokens=there if fits else np.zeros_like(result.tokens))


class FlagsOfTheStepBefore(Queued):
    """How rows ended is copied to the host ahead of the kernel that finds it out."""

    spec = spec("FlagsOfTheStepBefore")

    def edit(self, result):
        there, self.there = self.__dict__.get("there", np.zeros(0, np.uint8)), result.flags
        fits = len(there) == len(result.flags)
        return replace(result, flags=there if fits else result.flags & OVERSHOOT)


class LogprobsOfTheFirstRows(Queued):
    """Log-probabilities are computed for all rows of a step, and those of the first rows are returned for the drawing
    rows.
    """

    spec = spec("LogprobsOfTheFirstRows")

    def run(self, plan):
        runner, every = self.runner, {}
        forward = runner.forward

        def all_rows(plan):
            running = forward(replace(plan, samples=np.arange(len(plan.slots), dtype=np.int32)))
            every["hidden"], n = running.hidden, plan.samples
            running.plan = plan
            if running.hidden is not None:
                running.hidden = running.hidden[torch.from_numpy(n).long()] if len(n) else None
            return running

        runner.forward = all_rows
        super().run(plan)
        runner.forward = forward
        running: Running = self._running[-1]
        if running.logprobs is not None and every["hidden"] is not None:
            logits = runner.model.logits(every["hidden"][: len(plan.samples)]).float().log_softmax(-1)
            top = logits.topk(plan.topk)
            running.logprobs = (logits.amax(-1), running.logprobs[1], top.indices.int(), top.values)


class LogprobsOfTheFirstCapture(Queued):
    """The number of returned log-probabilities is that of the first step, which was captured."""

    spec = spec("LogprobsOfTheFirstCapture")

    def run(self, plan):
        if plan.topk >= 0:
            plan = replace(plan, topk=self.__dict__.setdefault("first", plan.topk))
        super().run(plan)


class WritesIntoThePlan(Queued):
    """Renumbers slots for a tensor-parallel rank in the arrays of the plan."""

    spec = spec("WritesIntoThePlan")

    def run(self, plan):
        super().run(plan)
        plan.computed[:] += plan.q_len
