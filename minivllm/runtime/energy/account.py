"""Whose joules: what a counter gave while an engine was busy, shared among its requests.

    ├─ idle ─┤├──────────────── busy ────────────────┤├ settling ┤├─ idle ─
             ▲        ▲        ▲        ▲            ▲          ▲
    readings of the counter, one each ``EVERY`` seconds at most; between two of them steps collect weights:
        weight of a request = sum over its rows of   seconds of the step · share of the row in the step
        share of row i      = (W · q_i / Σq + K_i) / (W + ΣK)

W: bytes of the weights, which all tokens of a step read together; q_i: tokens that row i computes; K_i: bytes of the KV
cache that it reads, and writes.  So a step's shares are those of the bytes that it moves.  A counter moves each 20 to
100 ms (NVML) while a step takes one, so no step is measured: joules between two readings are shared by weights.

Invariant: ``RequestJoules.measured`` of all requests + ``idle`` = what the counter has given since the engine was
built.  Behind the last step of a busy time the counter is waited for, ``SETTLE`` at most, because it tells late; until
it has moved the joules of requests that have ended are open (``RequestJoules.open``).  What it gave while steps ran is
the requests', whatever else the machine did.
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
LOOK = 0.002  # seconds between readings while the counter is waited for
SETTLE = 0.25  # seconds that it is waited for behind the last step
log = logging.getLogger("minivllm")


@dataclass(slots=True, eq=False)
class RequestJoules:
    """Of one request.  ``open``: weights of it wait for the counter to move.  ``lost``: the counter did not move in
    time, or could not be read, so that some of its work is in nobody's joules."""

    measured: float = 0.0
    weight: float = 0.0  # seconds of steps, since the counter moved last
    lost: bool = False

    @property
    def open(self) -> bool:
        return self.weight > 0.0

    @property
    def joules(self) -> float | None:
        """None while they are not known, and where no counter told them."""
        return None if self.open or self.lost else self.measured


class EnergyAccount:
    """Listens to an engine, on the thread of its loop.  ``now``: seconds of a real clock."""

    def __init__(self, meter: Meter, now: Callable[[], float] = time.perf_counter) -> None:
        self.meter, self.now = meter, now
        self.idle = self.busy = 0.0
        self.fault = ""  # why it counts no longer
        self._last, self._read_at = meter.joules(), now()
        self._working = False  # from a step's plan until nothing is in flight and nobody waits
        self._ended_at = 0.0
        self._begun: dict[int, float] = {}  # steps in flight
        self._published = 0.0
        self._stays: dict[int, RequestJoules] = {}  # serial of a stay in a slot -> whose it is
        self._open: dict[int, RequestJoules] = {}  # by id(): those with a weight that has left the columns
        self._waiting: list[tuple[RequestJoules, Callable[[], None]]] = []

    def attach(self, engine: Engine, windows: Sequence[int | None]) -> None:
        """Begin to listen.  The executor has started, so its sizes are known.  ``windows``: tokens that the layers of
        each KV group look back at, None: all."""
        self.engine, self.slots = engine, engine.slots
        sizes, block = engine.capacity.block_bytes, engine.wiring.block
        self._groups = [(size / block, w) for size, w in zip(sizes, windows, strict=True)]  # bytes of a token, window
        self._weights = float(max(engine.capacity.weight_bytes, 1))
        size, self._changes = engine.slots.size, -1
        self._serial = np.full(size, -1, np.int64)  # of the stay that ``_weight`` is of
        self._weight = np.zeros(size)
        events = engine.events
        events.planning.subscribe(self._plan)
        events.publishing.subscribe(self._publish)
        events.turn_ended.subscribe(self._turn_ended)
        events.request_finished.subscribe(self._request_finished)
        events.engine_stopped.subscribe(lambda error: self.close())
        events.stats_asked.subscribe(self._add_figures)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _plan(self, launch: Callable[[], StepPlan | None]) -> StepPlan | None:
        if not self._working:
            self._settle_late()
            self._read()  # up to here it was idle
        begun = self.now()
        plan = launch()
        if plan is not None:
            if not self._working:
                self._working, self._published = True, begun
            self._begun[plan.id] = begun
            if self.slots.changes != self._changes:
                self._changes = self.slots.changes
                self._admit()
        return plan

    def _admit(self) -> None:
        """Who has come into a slot since the last step; now, because it may have left when the result comes."""
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
        """What a stay has collected goes to its request."""
        if (whose := self._stays.get(int(self._serial[slot]))) is not None and self._weight[slot]:
            whose.weight += float(self._weight[slot])
            self._open[id(whose)] = whose
        self._weight[slot] = 0.0

    def _publish(self, publish: Callable[[Flight, StepResult], None], flight: Flight, result: StepResult) -> None:
        now = self.now()
        begun = max(self._begun.pop(flight.plan.id, now), self._published)
        self._published = now
        self._weigh(flight, now - begun)
        publish(flight, result)

    def _weigh(self, flight: Flight, seconds: float) -> None:
        """Share the seconds of a step among its rows."""
        plan, at, length = flight.plan, flight.slots, flight.after
        tokens, moved = int(plan.q_len.sum()), np.zeros(len(at))
        for size, window in self._groups:
            moved += size * (length if window is None else np.minimum(length, window + plan.q_len))
        moved += self._weights / tokens * (1 if tokens == len(at) else plan.q_len)
        moved *= seconds / moved.sum()
        mine = self._serial[at] == flight.serial
        if not mine.all():  # another stay has its slot by now
            for serial, weight in zip(flight.serial[~mine].tolist(), moved[~mine].tolist(), strict=True):
                if (whose := self._stays.get(serial)) is not None:
                    whose.weight += weight
                    self._open[id(whose)] = whose
            at, moved = at[mine], moved[mine]
        if len(plan.draft):  # a slot has several rows
            np.add.at(self._weight, at, moved)
        else:
            self._weight[at] += moved

    def _turn_ended(self) -> None:
        if not self._working:
            return
        if not self.engine.busy:
            self._rest()
        elif self.now() - self._read_at >= EVERY:
            self._gather()
            self._read()

    def _request_finished(self, request: Request) -> None:
        if self._working and not self.engine.busy:  # no turn may come behind an abort
            self._rest()

    def _rest(self) -> None:
        self._working, self._ended_at = False, self.now()
        self._gather()
        self._read()

    # ---- the counter ---------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """The weights of all slots to their requests; stays that are over are forgotten."""
        for slot in np.flatnonzero(self._weight).tolist():
            self._leave(slot)
        if len(self._stays) > 2 * len(self._serial):
            held = set(self.slots.serial[self.slots.running].tolist())
            held |= {serial for flight in self.engine.in_flight for serial in flight.serial.tolist()}
            self._stays = {serial: whose for serial, whose in self._stays.items() if serial in held}

    def _read(self) -> None:
        """What the counter gave since it moved last goes to those who have weights, else it was idle."""
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
        given = joules - self._last
        if given <= 0.0:
            return
        self._last = joules
        total = sum(whose.weight for whose in self._open.values())
        if total <= 0.0:
            self.idle += given
            return
        self.busy += given
        for whose in self._open.values():
            whose.measured += given * whose.weight / total
            whose.weight = 0.0
        self._open.clear()
        self._tell()

    def _lose(self) -> None:
        """Weights that no reading will come for."""
        for whose in self._open.values():
            whose.weight, whose.lost = 0.0, True
        self._open.clear()
        self._tell()

    def _settle_late(self) -> None:
        if self._open and self.now() - self._ended_at > SETTLE:
            self._lose()

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for whose, call in waiting:
            if whose.open:
                self._waiting.append((whose, call))
                continue
            try:
                call()
            except Exception:  # a listener's fault is not the engine's
                log.exception("a request's end could not be told")

    # ---- who asks ------------------------------------------------------------------------------------------------

    def when_known(self, request: Request, call: Callable[[], None]) -> None:
        """Call once the joules of a request that has ended are known, or will not be: now or in a later turn."""
        self._gather()
        if self.engine.dead or self.fault:
            self._lose()
        if request.energy is None or not request.energy.open:
            call()
        else:
            self._waiting.append((request.energy, call))

    @property
    def settling(self) -> bool:
        """Whether ``look`` is to be called each ``LOOK`` seconds: nothing runs, and the counter has not told all of
        what did."""
        return not self._working and bool(self._open)

    def look(self) -> None:
        """Read the counter, which is waited for ``SETTLE`` in all."""
        self._settle_late()
        if self._open:
            self._read()

    def close(self) -> None:
        """The engine has stopped: a counter that a thread reads is read no longer."""
        if (close := getattr(self.meter, "close", None)) is not None:
            close()

    def figures(self) -> dict[str, Any]:
        """``joules_per_output_token`` is of what it gave while busy, prompts and all; None before the first token."""
        tokens = self.engine.publisher.tokens
        return {
            "counter": self.meter.name,
            "busy_joules": round(self.busy, 6),
            "idle_joules": round(self.idle, 6),
            "joules_per_output_token": round(self.busy / tokens, 9) if tokens else None,
            **({"fault": self.fault} if self.fault else {}),
        }

    def _add_figures(self, stats: dict[str, Any]) -> None:
        if not self._working:
            self._settle_late()
            self._read()
        stats["energy"] = self.figures()
