"""Steps in which all that would happen is known, without the turns of the engine's loop, and turns that time nothing.

In most steps of a simulation every row that runs draws one token more, nobody enters and no policy is asked.  ``leap``
does to the engine's books what it would have done in those turns: columns once for a stretch of steps of the same rows,
and in between, when it is due, what takes a block, publishes one or ends a row, with the engine's own functions.  What
is decided, and when, is the same to the last bit (``tests/lab/test_leap.py``).
"""

from __future__ import annotations

import numpy as np

from minivllm.core.engine.engine import Engine
from minivllm.core.engine.steady import ONE, Steady
from minivllm.core.interfaces.finish import Finish
from minivllm.core.interfaces.plan import NO_CHANGE, StepPlan
from minivllm.errors import EngineDeadError, MinivllmError, describe_error
from minivllm.plugins.executor.clocks import ModelClock

from .device import Simulated

NEVER = np.full(1, np.iinfo(np.int32).max)
NO_ROWS = np.empty(0, np.intp)


def leap(engine: Engine, device: Simulated, clock: ModelClock, until: float | None) -> int:
    """Take as many steps as can be, and say how many.  ``until``: the next request comes then; a step that begins
    before is taken.  EngineDeadError if a plug-in fails in one."""
    s = engine.slots
    if engine.in_flight or engine.dead or engine.checked or s.timed or s.watched or engine.cache.slides:
        return 0
    taken = 0
    engine.within = "step"
    try:
        while not engine.dead and (until is None or clock.time < until):
            last = _last(engine, device)
            if last is None or not (more := _Stretch(engine, device, clock, last).take(until)):
                break
            taken += more
    except Exception as e:
        raise EngineDeadError(str(e) if isinstance(e, MinivllmError) else describe_error(e)) from e
    finally:
        engine.within = ""
    if engine.dead:
        raise EngineDeadError(engine.dead)
    return taken


def turn(engine: Engine, device: Simulated) -> bool:
    """``Engine.step`` without what a simulation has no use for: times of its parts, checks of what the device answers.
    EngineDeadError if a plug-in fails in it."""
    events = engine.events
    heard = events.planning.wrappers or events.publishing.wrappers or events.turn_ended.listeners
    if engine.in_flight or engine.capacity.depth or engine.checked or heard or engine.dead:
        return bool(engine.step())
    engine.within = "step"
    try:
        flight = engine.plan()
        if engine.dead or flight is None:
            return False
        if len(flight.plan.late):
            raise ValueError("a simulated request waits for masks")
        engine.in_flight.append(flight)
        device.submit(flight.plan)
        for result in device.collect(0):
            engine._publish(engine.in_flight.popleft(), result)
        engine.clock.count += 1
        return True
    except Exception as e:
        raise EngineDeadError(str(e) if isinstance(e, MinivllmError) else describe_error(e)) from e
    finally:
        engine.within = ""


def _last(engine: Engine, device: Simulated) -> Steady | None:
    """The plan that the next steps go on from, each row a token further; None if somebody may enter, or they do not."""
    p, s = engine.planner, engine.slots
    if p.n_waiting and (s.free or s.cooling or p.shared):
        return None
    last = p.steady
    if last is None or last.changes != s.changes:
        last = None if engine.capacity.depth else _before_first(engine)
    if last is not None and not device.goes_on(last.plan):
        if engine.capacity.depth:
            return None
        device.go_on(last.plan, last.slots)
    return last


def _before_first(engine: Engine) -> Steady | None:
    """As if the rows that run had been in the step before, where the planner would let all of them draw in the next one
    and ask no policy; None where it might do anything else."""
    p, s = engine.planner, engine.slots
    at = s.running
    if not 0 < len(at) <= p.max_tokens or s.asking or s.special or s.paired or s.tapping:
        return None
    if p.asks_shape or p.speculation or p.joins or p.forks or p.searches or p.chosen or p.stuck or p._ended:
        return None
    known = s.known[at]
    first = np.count_nonzero(known == s.prompt[at]) or np.count_nonzero(s.forking[at])
    if first or np.count_nonzero(p.need(at) != ONE):
        return None
    q_len, samples = np.ones(len(at), np.int32), np.arange(len(at), dtype=np.int32)
    plan = StepPlan(p.step_id, at.astype(np.int32), q_len, s.computed[at] - ONE, samples)
    return Steady(plan, at, s.changes, int((s.end[at] - known).min()), 0)


def _least(column: np.ndarray) -> int:
    return int(np.minimum.reduce(column))


class _Stretch:
    """Steps of the rows of the plan ``last``, each a token further.  Step k, from 1 on, computes the token at
    ``before + k`` of each row, so that it has KV of ``before + k + 1``; columns are [R]."""

    def __init__(self, engine: Engine, device: Simulated, clock: ModelClock, last: Steady) -> None:
        self.engine, self.device, self.clock, self.last = engine, device, clock, last
        self.slots, self.cache = engine.slots, engine.cache
        self.at, self.before = last.slots, last.plan.computed

    def take(self, until: float | None) -> int:
        """Until rows have ended, a row lacks a block that is not there, or a request comes."""
        device, clock, taken, ended = self.device, self.clock, 0, NO_ROWS
        most = min(self.last.steps - 1, device.again) if self.engine.capacity.depth else self.last.steps
        lacks, fills = self._lacks(), self._fills()
        lack, fill = _least(lacks), _least(fills)
        while taken < most and (until is None or clock.time < until):
            if lack <= taken + 1:
                rows = (lacks == lack).nonzero()[0]
                if len(rows) > self.cache.available:
                    break
                # as no group slides, each has what the others have, and a row lacks one in all of them
                self.cache.grow(self.at[rows], np.ones((len(self.cache.pools), len(rows)), np.int32))
                lacks[rows] += self.slots.block
                lack = _least(lacks)
            self._tell_nobody()
            if device.again and not device.wakes():
                taken += device.pass_steps(clock, min(lack - 1, max(fill, taken + 1)) - taken, until)
            else:
                taken += 1
                ended = device.pass_one(clock, self.last.plan)
            if taken >= fill:
                self._publish((fills <= taken).nonzero()[0], taken)
                fills = self._fills()
                fill = _least(fills)
        if taken:
            self._note(taken, lack)
        for slot in self.at[ended].tolist():
            self.engine.publisher.send(self.slots.at(slot), Finish("length"))
        return taken

    def _lacks(self) -> np.ndarray:
        """The step for which each row lacks a block."""
        return self.slots.blocks[0, self.at] * self.slots.block - self.before

    def _fills(self) -> np.ndarray:
        """The step in which each row fills the block that it is to publish next."""
        if not self.cache.prefix:
            return NEVER
        return (self.slots.prefix_published[self.at] + 1) * self.slots.block - self.before - 1

    def _tell_nobody(self) -> None:
        """What has changed since the last plan is for a device that has columns and tables."""
        p, s, cache = self.engine.planner, self.slots, self.cache
        if cache.table:
            cache.table, cache.trims, cache.copies, cache.duplicates = [], [], [], False
        if p.left:
            s.free.extend(s.cooling)
            for told_of in (s.cooling, p.left, p.keeps, p.forgotten):
                told_of.clear()

    def _publish(self, rows: np.ndarray, step: int) -> None:
        """Blocks that rows have filled may be shared from now on."""
        mine, before, tokens = self.at[rows].tolist(), self.before[rows].tolist(), self.device.tokens[rows].tolist()
        for slot, first, token in zip(mine, before, tokens, strict=True):
            self.slots.tokens[slot, first + 2 : first + step + 1] = token
        self.cache.publish([(slot, first + step + 1) for slot, first in zip(mine, before, strict=True)])

    def _plan(self, step: int) -> StepPlan:
        return self.last.plan.further(self.last.plan.id + step, self.before + np.int32(step), NO_CHANGE)

    def _note(self, taken: int, lack: int) -> None:
        """What the turns would have left in the engine's books; ``lack``: the step for which a row lacks a block."""
        p, s, at, last, plan = self.engine.planner, self.slots, self.at, self.last, self._plan(taken)
        s.tokens[at[:, None], (self.before + 2)[:, None] + np.arange(taken)] = self.device.tokens[:, None]
        s.computed[at] = plan.computed + 1
        s.known[at] = s.schedulable[at] = s.collected[at] = plan.computed + 2
        s.step[at] = s.published = p.step_id = plan.id
        p.steady = Steady(plan, at, last.changes, last.steps - taken, lack - 1 - taken)
        self.engine.publisher.tokens += taken * len(at)
        self.engine.clock.count += taken
