"""The energy account: the joules of a busy engine, divided among its requests.

    ├─ idle ─┤├──────────────── busy ────────────────┤├ settling ┤├─ idle ─
             ▲        ▲        ▲        ▲            ▲          ▲
    readings of the counter, at most one in ``EVERY`` seconds; between two readings steps add weights:
        weight of a request = sum over its rows of   seconds of the step · share of the row in the step
        share of row i      = (W · q_i / Σq + K_i) / (W + ΣK)

W is the bytes of the weights, which all tokens of a step read together.  q_i is the number of tokens that row i
computes.  K_i is the bytes of the KV cache that row i reads and writes.  So the shares follow the bytes that a step
moves.  A counter changes every 20 to 100 ms (NVML), and a step takes about 1 ms, so no single step is measured: the
joules between two readings are divided by weight.

Invariant: the sum of ``RequestJoules.measured`` over all requests, plus ``idle``, is the increase of the counter since
the engine was built.  A counter is late, so after the last step of a busy time the account waits for its next change,
at most ``SETTLE`` seconds.  Until then the joules of ended requests are open (``RequestJoules.open``).  All joules of
the time in which steps ran count for the requests, even if other programs used the machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.flight import Flight
    from minivllm.core.engine.request import Request
    from minivllm.core.interfaces.plan import StepPlan, StepResult

    from .counters import Meter

EVERY = 0.05  # seconds between readings while steps run
LOOK = 0.002  # seconds between readings after the last step
SETTLE = 0.25  # longest time in seconds to wait for the counter after the last step
log = logging.getLogger("minivllm")


@dataclass(slots=True, eq=False)
class RequestJoules:
    """The joules of one request.

    ``lost`` means that some work of the request is in no request's joules, because the counter did not change in time
    or could not be read."""

    measured: float = 0.0
    weight: float = 0.0  # weighted seconds of steps since the counter last changed
    lost: bool = False

    @property
    def open(self) -> bool:
        """Return whether the request has work that waits for a change of the counter."""
        return self.weight > 0.0

    @property
    def joules(self) -> float | None:
        """Return the joules, or None while they are not measured yet, and if they are lost."""
        return None if self.open or self.lost else self.measured


class EnergyAccount:
    """The account of one engine, used on the thread of its loop.  ``now`` returns the seconds of a real clock.

    A *stay* is the time of one sequence in a slot; each stay has a serial number.  The columns ``_serial`` and
    ``_weight`` have the current stay of each slot."""

    def __init__(self, meter: Meter, now: Callable[[], float] = time.perf_counter) -> None:
        self.meter, self.now = meter, now
        self.idle = self.busy = 0.0  # joules
        self.fault = ""  # the reason why the counter is not read any more
        self._last = meter.joules()
        self._read_at = now()
        self._working = False  # whether steps are planned, in flight, or wait
        self._ended_at = 0.0
        self._begun: dict[int, float] = {}  # step in flight -> time of its start
        self._published = 0.0  # time of the last result
        # serial number of a stay (sequence in a slot) -> joules of its request
        self._stays: dict[int, RequestJoules] = {}
        # id() of a request -> its joules; only requests with a weight outside the columns
        self._open: dict[int, RequestJoules] = {}
        self._waiting: list[tuple[RequestJoules, Callable[[], None]]] = []

    def attach(self, engine: Engine, windows: Sequence[int | None]) -> None:
        """Subscribe to the events of an engine whose executor has started.

        ``windows`` has the attention window of each KV group in tokens; None means no window."""
        self.engine, self.slots = engine, engine.slots
        sizes, block = engine.capacity.block_bytes, engine.wiring.block
        self._groups = [(size / block, window) for size, window in zip(sizes, windows, strict=True)]  # bytes a token
        self._weights = float(max(engine.capacity.weight_bytes, 1))
        self._changes = -1  # number of the last change of the slots that ``_admit`` has seen
        self._serial = np.full(engine.slots.size, -1, np.int64)
        self._weight = np.zeros(engine.slots.size)
        events = engine.events
        events.planning.subscribe(self._plan)
        events.publishing.subscribe(self._publish)
        events.turn_ended.subscribe(self._turn_ended)
        events.request_finished.subscribe(self._request_finished)
        events.engine_stopped.subscribe(lambda error: self.close())
        events.stats_asked.subscribe(self._add_figures)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _plan(self, launch: Callable[[], StepPlan | None]) -> StepPlan | None:
        """Return the plan of the step that ``launch`` submits, None if it submits none.  Note the start of the step and
        the stays of the requests in its slots."""
        if not self._working:
            self._settle_late()
            self._read()  # the joules counted up to now belong to the idle engine
        begun = self.now()
        plan = launch()
        if plan is not None:
            if not self._working:
                self._working = True
                self._published = begun
            self._begun[plan.id] = begun
            if self.slots.changes != self._changes:
                self._changes = self.slots.changes
                self._admit()
        return plan

    def _admit(self) -> None:
        """Store each sequence that entered a slot since the last step, with the joules of its request.

        It may have left the slot when the result of the step arrives.
        """
        slots, serial, running = self.slots, self.slots.serial, self.slots.running
        for slot in running[serial[running] != self._serial[running]].tolist():
            self._leave(slot)
            seq = slots.seq[slot]
            request: Request | None = None if seq is None else seq.request
            if request is not None:
                request.energy = request.energy or RequestJoules()
                self._stays[int(serial[slot])] = request.energy
            self._serial[slot] = serial[slot]

    def _leave(self, slot: int) -> None:
        """Add the weight of a slot to the request of the sequence in the slot, and set the weight to 0."""
        if self._weight[slot]:
            self._add_weight(int(self._serial[slot]), float(self._weight[slot]))
        self._weight[slot] = 0.0

    def _add_weight(self, serial: int, weight: float) -> None:
        """Add a weight to the request of the sequence with the serial number ``serial``, if the number is known."""
        request = self._stays.get(serial)
        if request is not None:
            request.weight += weight
            self._open[id(request)] = request

    def _publish(self, publish: Callable[[Flight, StepResult], None], flight: Flight, result: StepResult) -> None:
        """Divide the seconds of a step among its rows, then publish its result."""
        now = self.now()
        begun = max(self._begun.pop(flight.plan.id, now), self._published)
        self._published = now
        self._weigh(flight, now - begun)
        publish(flight, result)

    def _weigh(self, flight: Flight, seconds: float) -> None:
        """Divide the seconds of a step among its rows, by the bytes that each row moves."""
        plan, slots, length = flight.plan, flight.slots, flight.after
        tokens = int(plan.q_len.sum())
        moved = np.zeros(len(slots))  # bytes that each row moves, later the weight of the row
        for size, window in self._groups:
            moved += size * (length if window is None else np.minimum(length, window + plan.q_len))
        moved += self._weights / tokens * (1 if tokens == len(slots) else plan.q_len)
        moved *= seconds / moved.sum()
        current = self._serial[slots] == flight.serial
        if not current.all():  # another sequence has entered some of the slots
            for serial, weight in zip(flight.serial[~current].tolist(), moved[~current].tolist(), strict=True):
                self._add_weight(serial, weight)
            slots, moved = slots[current], moved[current]
        if len(plan.draft):  # a slot has several rows
            np.add.at(self._weight, slots, moved)
        else:
            self._weight[slots] += moved

    def _turn_ended(self) -> None:
        """Read the counter if it is time, or if the engine has no more work."""
        if not self._working:
            return
        if not self.engine.busy:
            self._rest()
        elif self.now() - self._read_at >= EVERY:
            self._gather()
            self._read()

    def _request_finished(self, request: Request) -> None:
        """End the busy time if the last request was aborted, because no turn of the loop may follow."""
        if self._working and not self.engine.busy:
            self._rest()

    def _rest(self) -> None:
        """End the busy time: give the weights of all slots to their requests, and read the counter."""
        self._working = False
        self._ended_at = self.now()
        self._gather()
        self._read()

    # ---- the counter ---------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Move the weights of all slots to their requests, and forget ended stays."""
        for slot in np.flatnonzero(self._weight).tolist():
            self._leave(slot)
        if len(self._stays) > 2 * len(self._serial):
            held = set(self.slots.serial[self.slots.running].tolist())
            held |= {serial for flight in self.engine.in_flight for serial in flight.serial.tolist()}
            self._stays = {serial: request for serial, request in self._stays.items() if serial in held}

    def _read(self) -> None:
        """Divide the joules since the last change of the counter by weight; without weights they are idle."""
        self._read_at = self.now()
        if self.fault:
            self._lose()
            return
        try:
            joules = self.meter.joules()
        except (OSError, ValueError) as e:
            self.fault = str(e) or type(e).__name__
            log.warning("energy is counted no longer: %s cannot be read: %s", self.meter.name, self.fault)
            self._lose()
            return
        increase = joules - self._last
        if increase <= 0.0:
            return
        self._last = joules
        total = sum(request.weight for request in self._open.values())
        if total <= 0.0:
            self.idle += increase
            return
        self.busy += increase
        for request in self._open.values():
            request.measured += increase * request.weight / total
            request.weight = 0.0
        self._open.clear()
        self._notify()

    def _lose(self) -> None:
        """Mark the open joules as lost, because no reading will follow."""
        for request in self._open.values():
            request.weight = 0.0
            request.lost = True
        self._open.clear()
        self._notify()

    def _settle_late(self) -> None:
        """Mark the open joules as lost if the counter has not changed in time."""
        if self._open and self.now() - self._ended_at > SETTLE:
            self._lose()

    def _notify(self) -> None:
        """Call the functions whose joules are complete, and keep those that still wait.  Their exceptions are only
        logged."""
        waiting = self._waiting
        self._waiting = []
        for joules, call in waiting:
            if joules.open:
                self._waiting.append((joules, call))
                continue
            try:
                call()
            except Exception:  # an error of the caller must not end the engine
                log.exception("the end of a request could not be reported")

    # ---- for the engine and its clients --------------------------------------------------------------------------

    def when_known(self, request: Request, call: Callable[[], None]) -> None:
        """Call a function once the joules of an ended request are known or lost: now or in a later turn."""
        self._gather()
        if self.engine.dead or self.fault:
            self._lose()
        if request.energy is None or not request.energy.open:
            call()
        else:
            self._waiting.append((request.energy, call))

    @property
    def settling(self) -> bool:
        """Return whether the engine is idle with open joules, so that ``look`` is due every ``LOOK`` seconds."""
        return not self._working and bool(self._open)

    def look(self) -> None:
        """Read the counter while joules are open, at most ``SETTLE`` seconds after the last step."""
        self._settle_late()
        if self._open:
            self._read()

    def close(self) -> None:
        """Stop reading the counter, because the engine has stopped."""
        close = getattr(self.meter, "close", None)
        if close is not None:
            close()

    def figures(self) -> dict[str, Any]:
        """Return the joules of the engine.

        ``joules_per_output_token`` divides all busy joules, including those of prompts, by the generated tokens.  It is
        None before the first token."""
        tokens = self.engine.publisher.tokens
        return {
            "counter": self.meter.name,
            "busy_joules": round(self.busy, 6),
            "idle_joules": round(self.idle, 6),
            "joules_per_output_token": round(self.busy / tokens, 9) if tokens else None,
            **({"fault": self.fault} if self.fault else {}),
        }

    def _add_figures(self, stats: dict[str, Any]) -> None:
        """Add the figures to the engine's statistics."""
        if not self._working:
            self._settle_late()
            self._read()
        stats["energy"] = self.figures()
