"""Take predictable steps of a simulation without turns of the engine's loop, and run other turns without timing them.

In most steps of a simulation every running row generates a token, no row joins and no plug-in decides anything.
``leap`` updates the engine's state as these turns would.  It updates columns once for a stretch of steps of the same
rows.  Within the stretch it allocates and publishes blocks and ends rows with the engine's own functions.  Every
decision and its time are the same to the last bit (``tests/lab/test_leap.py``).
"""

from __future__ import annotations

import numpy as np

from minivllm.core.engine import publication
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
    """Simulate as many predictable steps as possible, and return their number.

    ``until`` is the time of the next arrival, or None.  A step may be simulated if it begins before this time.  Raise
    EngineDeadError if a plug-in fails.
    """
    s = engine.slots
    if engine.in_flight or engine.dead or engine.checked or s.timed or s.watched or engine.cache.slides:
        return 0
    taken = 0
    engine.within = "step"
    try:
        while not engine.dead and (until is None or clock.time < until):
            last = _last_step(engine, device)
            if last is None:
                break
            more = _Stretch(engine, device, clock, last).take(until)
            if not more:
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
    """Run a turn as ``Engine.step`` does, without timing its parts and checking the device's results.

    Return whether it did work.  Raise EngineDeadError if a plug-in fails.
    """
    events = engine.events
    has_listeners = events.planning.wrappers or events.publishing.wrappers or events.turn_ended.listeners
    if engine.in_flight or engine.capacity.depth or engine.checked or has_listeners or engine.dead:
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


def _last_step(engine: Engine, device: Simulated) -> Steady | None:
    """Return the step that the next steps repeat with one more token in each row, or None.

    None means that a waiting request may join, or that the rows have changed.
    """
    p = engine.planner
    s = engine.slots
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
    """Return an imaginary step with the running rows that precedes the next step, or None.

    None means that the next step is not predictable: a row would not generate a token, or a plug-in would decide.
    """
    p = engine.planner
    s = engine.slots
    at = s.running
    if not 0 < len(at) <= p.max_tokens or s.asking or s.special or s.paired or s.tapping:
        return None
    if p.asks_shape or p.speculation or p.joins or p.forks or p.searches or p.chosen or p.stuck or p._ended:
        return None
    known = s.known[at]
    first = np.count_nonzero(known == s.prompt[at]) or np.count_nonzero(s.forking[at])
    if first or np.count_nonzero(p.need(at) != ONE):
        return None
    q_len = np.ones(len(at), np.int32)
    samples = np.arange(len(at), dtype=np.int32)
    plan = StepPlan(p.step_id, at.astype(np.int32), q_len, s.computed[at] - ONE, samples)
    steps_to_end = int((s.end[at] - known).min())
    return Steady(plan, at, s.changes, steps_to_end, 0)


def _least(column: np.ndarray) -> int:
    """Return the least element; ``reduce`` is faster than ``min``."""
    return int(np.minimum.reduce(column))


class _Stretch:
    """Steps that repeat the rows of the step ``last``, each a token further.

    Step k, counted from 1, computes the token at position ``before + k`` of each row, which then has KV of
    ``before + k + 1`` tokens.  Columns are [rows].
    """

    def __init__(self, engine: Engine, device: Simulated, clock: ModelClock, last: Steady) -> None:
        self.engine = engine
        self.device = device
        self.clock = clock
        self.last = last
        self.slots = engine.slots
        self.cache = engine.cache
        self.at = last.slots
        self.before = last.plan.computed

    def take(self, until: float | None) -> int:
        """Simulate steps until rows end, a row needs a block and none is free, or the time is ``until``.

        Return the number of steps.
        """
        device = self.device
        clock = self.clock
        taken = 0
        ended = NO_ROWS
        most = self.last.steps
        if self.engine.capacity.depth:
            most = min(most - 1, device.again)
        lacks = self._lacks()
        fills = self._fills()
        lack = _least(lacks)
        fill = _least(fills)
        while taken < most and (until is None or clock.time < until):
            if lack <= taken + 1:
                rows = (lacks == lack).nonzero()[0]
                if len(rows) > self.cache.available:
                    break
                # no KV group has a sliding window, so a row needs its next block in all groups in the same step
                one_each = np.ones((len(self.cache.pools), len(rows)), np.int32)
                self.cache.grow(self.at[rows], one_each)
                lacks[rows] += self.slots.block
                lack = _least(lacks)
            self._drop_changes()
            if device.again and not device.wakes():
                next_event = min(lack - 1, max(fill, taken + 1))
                taken += device.pass_steps(clock, next_event - taken, until)
            else:
                taken += 1
                ended = device.pass_one(clock, self.last.plan)
            if taken >= fill:
                self._publish((fills <= taken).nonzero()[0], taken)
                fills = self._fills()
                fill = _least(fills)
        if taken:
            self._update_engine(taken, lack)
        for slot in self.at[ended].tolist():
            self.engine.publisher.send(self.slots.at(slot), Finish("length"))
        return taken

    def _lacks(self) -> np.ndarray:
        """Return the step for which each row needs a new block."""
        return self.slots.blocks[0, self.at] * self.slots.block - self.before

    def _fills(self) -> np.ndarray:
        """Return the step in which each row fills the next block that it publishes."""
        if not self.cache.prefix:
            return NEVER
        return (self.slots.prefix_published[self.at] + 1) * self.slots.block - self.before - 1

    def _drop_changes(self) -> None:
        """Clear the changes since the last plan, which this device does not need: it has no block tables."""
        p = self.engine.planner
        s = self.slots
        cache = self.cache
        if cache.table:
            cache.table = []
            cache.trims = []
            cache.copies = []
            cache.duplicates = False
        if p.left:
            s.free.extend(s.cooling)
            for changes in (s.cooling, p.left, p.keeps, p.forgotten):
                changes.clear()

    def _publish(self, rows: np.ndarray, step: int) -> None:
        """Publish the blocks that some rows have filled by a step, so that other requests can share them."""
        slots = self.at[rows].tolist()
        before = self.before[rows].tolist()
        tokens = self.device.tokens[rows].tolist()
        for slot, first, token in zip(slots, before, tokens, strict=True):
            self.slots.tokens[slot, first + 2 : first + step + 1] = token
        lengths = [first + step + 1 for first in before]
        publication.publish(self.cache, zip(slots, lengths, strict=True))

    def _plan(self, step: int) -> StepPlan:
        """Return the plan of a step."""
        return self.last.plan.further(self.last.plan.id + step, self.before + np.int32(step), NO_CHANGE)

    def _update_engine(self, taken: int, lack: int) -> None:
        """Set the engine's state to that after ``taken`` steps; ``lack`` is the step for which a row needs a block."""
        p = self.engine.planner
        s = self.slots
        at = self.at
        last = self.last
        plan = self._plan(taken)
        s.tokens[at[:, None], (self.before + 2)[:, None] + np.arange(taken)] = self.device.tokens[:, None]
        s.computed[at] = plan.computed + 1
        s.known[at] = s.schedulable[at] = s.collected[at] = plan.computed + 2
        s.step[at] = s.published = p.step_id = plan.id
        p.steady = Steady(plan, at, last.changes, last.steps - taken, lack - 1 - taken)
        self.engine.publisher.tokens += taken * len(at)
        self.engine.clock.count += taken
