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
from minivllm.core.engine.steady import Steady, next_steady
from minivllm.core.interfaces.plan import NO_CHANGE
from minivllm.errors import EngineDeadError, MinivllmError, told
from minivllm.plugins.executor.clocks import ModelClock

from .device import Simulated

FEWEST = 2  # steps that are taken in one go


def leap(engine: Engine, device: Simulated, clock: ModelClock, until: float | None) -> int:
    """Take as many steps as can be, and say how many.  ``until``: the next request comes then; a step that begins
    before is taken.  EngineDeadError if a plug-in fails in one."""
    s = engine.planner.slots
    if engine.in_flight or engine.checked or s.timed or s.watched or engine.cache.slides:
        return 0
    taken = 0
    try:
        while (last := engine.planner.steady) is not None and min(last.steps - 1, device.again) > 0:
            if last.changes != s.changes or (until is not None and clock.time >= until):
                break
            if not (more := _several(engine, device, clock, until) or _one(engine, device, clock)):
                break
            taken += more
    except Exception as e:
        raise EngineDeadError(str(e) if isinstance(e, MinivllmError) else told(e)) from e
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
        raise EngineDeadError(str(e) if isinstance(e, MinivllmError) else told(e)) from e
    finally:
        engine.within = ""


def _several(engine: Engine, device: Simulated, clock: ModelClock, until: float | None) -> int:
    """Steps in one go: until a row ends or lacks a block, with that in which one has filled its block, or a request
    comes."""
    p, s, cache = engine.planner, engine.planner.slots, engine.cache
    last = p.steady
    if last is None or last.room < FEWEST or cache.table or cache.trims:
        return 0
    if p.n_waiting and (s.free or s.cooling or p.shared):
        return 0  # somebody may enter
    at, before = last.slots, last.plan.computed
    most = min(last.steps - 1, last.room, device.again)
    if cache.prefix:
        most = min(most, int((s.block * (s.prefix_published[at] + 1) - before).min()) - 1)
    if most < FEWEST:
        return 0
    taken = 0
    while taken < most and (until is None or clock.time < until):
        device.pass_step(clock)
        taken += 1
    computed = before + np.int32(taken)
    s.tokens[at[:, None], (before + 2)[:, None] + np.arange(taken)] = device.tokens[:, None]
    s.computed[at] = computed + 1
    s.known[at] = s.schedulable[at] = computed + 2
    p.step_id += taken
    s.step[at] = p.step_id
    plan = last.plan.further(p.step_id, computed, NO_CHANGE)
    p.steady = Steady(plan, at, last.changes, last.steps - taken, last.room - taken)
    _published(engine, device, p.steady, taken)
    _keep_filled(engine, at, computed + 1)
    return taken


def _one(engine: Engine, device: Simulated, clock: ModelClock) -> int:
    """A step that takes blocks, or fills some."""
    if next_steady(engine.planner) is None:
        return 0
    device.pass_step(clock)
    last, s = engine.planner.steady, engine.planner.slots
    assert last is not None
    at, after = last.slots, last.plan.computed + 1
    s.tokens[at, after] = device.tokens
    _published(engine, device, last, 1)
    _keep_filled(engine, at, after)
    return 1


def _keep_filled(engine: Engine, at: np.ndarray, after: np.ndarray) -> None:
    """Blocks that the rows have filled may be shared from now on.  ``after``: tokens whose KV each has."""
    s, cache = engine.planner.slots, engine.cache
    if cache.prefix and np.count_nonzero(full := after // s.block > s.prefix_published[at]):
        cache.publish(list(zip(at[full].tolist(), after[full].tolist(), strict=True)))


def _published(engine: Engine, device: Simulated, last: Steady, steps: int) -> None:
    s, at = engine.planner.slots, last.slots
    s.collected[at], s.published = s.known[at], last.plan.id
    engine.publisher.tokens += steps * len(at)
    engine.clock.count += steps
    device.last_plan(last.plan)
