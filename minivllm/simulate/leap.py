"""Steps in which all that would happen is known, without the turns of the engine's loop, and turns that time nothing.

In most steps of a simulation the same rows draw one token more: nobody comes or goes and no policy is asked.  The
engine would plan and publish each of them as the one before.  ``leap`` does to its books what it would have done in
those turns: in one go for as many as need no block and fill none, else one by one, with the engine's own functions for
what takes and publishes blocks.  What is decided, and when, is the same to the last bit
(``tests/record/test_leap.py``).
"""

from __future__ import annotations

import numpy as np

from minivllm.core.engine.engine import Engine
from minivllm.core.engine.steady import Steady
from minivllm.core.interfaces.plan import NO_CHANGE
from minivllm.errors import EngineDeadError, MinivllmError, told
from minivllm.plugins.executor.clocks import ModelClock

from .device import Simulated

NEVER = np.full(1, np.iinfo(np.int32).max)


def leap(engine: Engine, device: Simulated, clock: ModelClock, until: float | None) -> int:
    """Take as many steps as can be, and say how many.  ``until``: the next request comes then; a step that begins
    before is taken.  EngineDeadError if a plug-in fails in one."""
    p, s = engine.planner, engine.planner.slots
    if engine.in_flight or engine.checked or s.timed or s.watched or engine.cache.slides:
        return 0
    if p.n_waiting and (s.free or s.cooling or p.shared):
        return 0  # somebody may enter
    last = p.steady
    if last is None or last.changes != s.changes or (most := min(last.steps - 1, device.again)) <= 0:
        return 0
    try:
        return _Stretch(engine, device, clock, last).take(most, until)
    except Exception as e:
        raise EngineDeadError(str(e) if isinstance(e, MinivllmError) else told(e)) from e


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
        raise EngineDeadError(str(e) if isinstance(e, MinivllmError) else told(e)) from e
    finally:
        engine.within = ""


class _Stretch:
    """Steps of the rows of the plan ``last``, each a token further.  Step k, from 1 on, computes the token at
    ``before + k`` of each row, so that it has KV of ``before + k + 1``; columns are [R]."""

    def __init__(self, engine: Engine, device: Simulated, clock: ModelClock, last: Steady) -> None:
        self.engine, self.device, self.clock, self.last = engine, device, clock, last
        self.slots, self.cache = engine.planner.slots, engine.cache
        self.at, self.before = last.slots, last.plan.computed

    def take(self, most: int, until: float | None) -> int:
        """Until a row lacks a block that is not there, a request comes, or ``most`` are taken."""
        device, clock, taken = self.device, self.clock, 0
        lacks, fills = self._lacks(), self._fills()
        lack, fill = int(lacks.min()), int(fills.min())
        while taken < most and (until is None or clock.time < until):
            if lack <= taken + 1:
                if not self._grow(np.flatnonzero(lacks <= taken + 1), taken + 1):
                    break
                lacks = self._lacks()
                lack = int(lacks.min())
            if self.cache.table:
                self._tell_nobody()
            taken += device.pass_steps(clock, min(most, lack - 1, max(fill, taken + 1)) - taken, until)
            if taken >= fill:
                self._publish(np.flatnonzero(fills <= taken), taken)
                fills = self._fills()
                fill = int(fills.min())
        if taken:
            self._note(taken, lack)
        return taken

    def _lacks(self) -> np.ndarray:
        """The step for which each row lacks a block."""
        return self.slots.blocks[:, self.at].min(axis=0) * self.slots.block - self.before

    def _fills(self) -> np.ndarray:
        """The step in which each row fills the block that it is to publish next."""
        if not self.cache.prefix:
            return NEVER
        return (self.slots.prefix_published[self.at] + 1) * self.slots.block - self.before - 1

    def _grow(self, rows: np.ndarray, step: int) -> bool:
        """Blocks for a step to those that lack some; False if there are too few."""
        mine = self.at[rows]
        missing = self.cache.missing(mine, self.before[rows] + (step + 1))
        if not self.cache.can_take(missing):
            return False
        self.cache.grow(mine, missing)
        return True

    def _tell_nobody(self) -> None:
        """What has changed in the tables is for a device that has them."""
        cache = self.cache
        cache.table, cache.trims, cache.copies, cache.twins = [], [], [], False

    def _publish(self, rows: np.ndarray, step: int) -> None:
        """Blocks that rows have filled may be shared from now on."""
        mine, before, tokens = self.at[rows].tolist(), self.before[rows].tolist(), self.device.tokens[rows].tolist()
        for slot, first, token in zip(mine, before, tokens, strict=True):
            self.slots.tokens[slot, first + 2 : first + step + 1] = token
        self.cache.publish([(slot, first + step + 1) for slot, first in zip(mine, before, strict=True)])

    def _note(self, taken: int, lack: int) -> None:
        """What the turns would have left in the engine's books; ``lack``: the step for which a row lacks a block."""
        p, s, at, last = self.engine.planner, self.slots, self.at, self.last
        computed = self.before + np.int32(taken)
        s.tokens[at[:, None], (self.before + 2)[:, None] + np.arange(taken)] = self.device.tokens[:, None]
        s.computed[at] = computed + 1
        s.known[at] = s.schedulable[at] = s.collected[at] = computed + 2
        p.step_id += taken
        s.step[at] = s.published = p.step_id
        plan = last.plan.further(p.step_id, computed, NO_CHANGE)
        p.steady = Steady(plan, at, last.changes, last.steps - taken, lack - 1 - taken)
        self.engine.publisher.tokens += taken * len(at)
        self.engine.clock.count += taken
        self.device.last_plan(plan)
