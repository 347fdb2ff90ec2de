"""Connection of an engine's events to its hooks.  A view of an event is made only if a plug-in has the hook."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.timing import PLAN, PUBLISH, SUBMIT, WAIT

from .manager import HookManager
from .views import BlocksView, EngineView, FinishedStep, PlannedStep, PreemptionView, RequestEnd, RequestView

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.flight import Flight
    from minivllm.core.engine.request import Request, Seq
    from minivllm.core.interfaces.evictor import BlockInfo
    from minivllm.core.interfaces.plan import StepPlan, StepResult

STEPS = ("minivllm_plan_and_submit", "minivllm_publish", "minivllm_step_finished")


class EngineHooks:
    """Subscriber to the events of an engine that calls its hooks.  It subscribes only to events of implemented hooks.

    ``parts`` maps each kind of plug-in to the chosen plug-in, for the view of the engine."""

    def __init__(self, manager: HookManager, parts: Mapping[str, str], engine: Engine) -> None:
        self.manager = manager
        self.parts = MappingProxyType(dict(parts))
        self.engine, self.clock, self.failures = engine, engine.clock, manager.failures
        manager.times = engine.clock.seams
        # id of a step in flight -> (its view, the row of its times in the engine's clock)
        self._planned: dict[int, tuple[PlannedStep, int]] = {}
        # (view, row in the clock, result) of each step of this turn of the loop
        self._published: list[tuple[PlannedStep, int, StepResult]] = []
        self._running = False
        events, listens = engine.events, manager.listens
        events.stats_asked.subscribe(self._add_figures)
        events.engine_stopped.subscribe(self.stopped)
        if listens("minivllm_request_added"):
            events.request_added.subscribe(self._request_added)
        if listens("minivllm_request_finished"):
            events.request_finished.subscribe(self._request_finished)
        if listens("minivllm_preempted"):
            events.sequence_preempted.subscribe(self._preempted)
        if listens(*STEPS):
            events.planning.subscribe(self._launch)
            events.publishing.subscribe(self._publish)
            events.turn_ended.subscribe(self._turn_ended)
        if listens("minivllm_stored"):
            events.blocks_stored.subscribe(self._stored)
        if listens("minivllm_evicted", "minivllm_removed"):
            events.blocks_evicted.subscribe(self._evicted)
        if listens("minivllm_removed"):
            events.blocks_dropped.subscribe(self._dropped)

    # ---- start and stop ------------------------------------------------------------------------------------------

    def started(self) -> None:
        """Call the hooks for a started engine.  If a hook raises, call the hooks for a stopped engine and raise."""
        w = self.engine.wiring
        blocks = tuple(pool.total - 1 for pool in self.engine.cache.pools)
        self.view = EngineView(
            w.model_dir,
            w.device,
            w.dtype,
            w.block,
            blocks,
            w.max_num_seqs,
            w.max_num_batched_tokens,
            w.max_model_len,
            self.parts,
        )
        self._running = True
        try:
            self.manager.start(engine=self.view)
        except BaseException as exc:
            # Hooks that have started already are called for the stop, so that they release their resources.
            self.stopped(f"a hook failed at start: {exc}")
            raise

    def stopped(self, error: str | None) -> None:
        """Call the hooks for a stopped engine, once.  ``error`` is the reason if the engine failed."""
        if self._running:
            self._running = False
            self.manager.notify("minivllm_engine_stopped", engine=self.view, error=error)

    def _add_figures(self, stats: dict[str, Any]) -> None:
        """Add the figures and failures of hooks to the engine's statistics."""
        stats["figures"] = {**stats.get("figures", {}), **self.manager.figures()}
        stats["hook_failures"] = self.failures()

    # ---- requests ------------------------------------------------------------------------------------------------

    def _request_added(self, request: Request) -> None:
        """Call the hooks for an accepted request."""
        self.manager.notify("minivllm_request_added", request=view_of(request))

    def _request_finished(self, request: Request) -> None:
        """Call the hooks for an ended request."""
        seqs = request.sequences
        assert request.finished is not None
        end = RequestEnd(
            reasons=tuple(s.finish_reason or "" for s in seqs),
            tokens=tuple(s.emitted for s in seqs),
            cached_tokens=request.cached_tokens,
            preempted=sum(s.preempted for s in seqs),
            scheduled=request.scheduled,
            first_token=request.first_token,
            finished=request.finished,
            error=next((s.error for s in seqs if s.error), None),
        )
        self.manager.notify("minivllm_request_finished", request=view_of(request), end=end)

    def _preempted(self, seq: Seq) -> None:
        """Call the hooks for a preempted sequence."""
        view = PreemptionView(seq.request.id, seq.id, seq.known, seq.preempted)
        self.manager.notify("minivllm_preempted", preemption=view)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _launch(self, launch: Callable[[], StepPlan | None]) -> StepPlan | None:
        """Plan and submit a step inside the wrappers (generators that hooks run around it).  Return its plan, None if
        there is no step."""
        turn = self.clock.count
        return self.manager.wrap("minivllm_plan_and_submit", lambda: self._note(launch()), self._seen, turn=turn)

    def _note(self, plan: StepPlan | None) -> StepPlan | None:
        """Store the view of a submitted step, and return its plan.  ``plan`` None means that no step was submitted."""
        if plan is not None:
            # now, because a slot may belong to another sequence when the result arrives
            sequence = self.engine.slots.id[plan.slots]
            view = PlannedStep(plan.id, *map(frozen, (sequence, plan.q_len, plan.computed, plan.samples)))
            self._planned[plan.id] = view, self.clock.count % self.clock.size
        return plan

    def _seen(self, plan: StepPlan | None) -> PlannedStep | None:
        """Return the view of a submitted step, or None without a step."""
        return None if plan is None else self._planned[plan.id][0]

    def _publish(self, publish: Callable[[Flight, StepResult], None], flight: Flight, result: StepResult) -> None:
        """Call ``publish`` inside the plug-ins' wrappers of the hook ``minivllm_publish``.

        The result is kept for ``minivllm_step_finished`` if a plug-in has that hook.
        """
        view, row = self._planned.pop(result.id)
        self.manager.wrap("minivllm_publish", lambda: publish(flight, result), lambda none: None, step=view)
        if self.manager.listens("minivllm_step_finished"):
            self._published.append((view, row, result))

    def _turn_ended(self) -> None:
        """Call the hooks for the steps whose results this turn of the loop has processed."""
        if not self._published:
            return
        published = self._published
        self._published = []
        part = self.clock.part
        here = (self.clock.count - 1) % self.clock.size  # the row of this turn in the clock's table of times
        figures = self._figures()
        for view, row, result in published:
            step = FinishedStep(
                view.id,
                view.sequence,
                view.q_len,
                view.computed,
                view.drawn,
                token=frozen(result.tokens),
                count=frozen(result.count),
                flags=frozen(result.flags),
                error=next((f"{e.plugin}: {e.message}" for e in result.errors), None),
                time=time.monotonic(),
                plan_ms=1e3 * float(part[row, PLAN]),
                submit_ms=1e3 * float(part[row, SUBMIT]),
                wait_ms=1e3 * float(part[here, WAIT]),
                publish_ms=1e3 * float(part[here, PUBLISH]),
                device_ms=result.device_ms,
                **figures,
            )
            self.manager.notify("minivllm_step_finished", step=step)

    def _figures(self) -> dict[str, int]:
        """Return the figures of the engine for the view of a finished step."""
        e = self.engine
        lead = e.cache.pools[0]
        return {
            "running": e.slots.n_running,
            "waiting": e.planner.n_waiting,
            "blocks_total": lead.total - 1,
            "blocks_free": lead.free,
            "blocks_cached": lead.idle,
            "finished": e.finished,
            "generated": e.publisher.tokens,
            "preemptions": e.planner.preemptions,
            "evictions": sum(p.evictions for p in e.cache.pools),
            "prefix_queries": lead.queries,
            "prefix_hits": lead.hits,
        }

    # ---- the prefix cache ----------------------------------------------------------------------------------------

    def _stored(self, group: int, keys: np.ndarray, info: BlockInfo) -> None:
        """Call the hooks for blocks that entered the prefix cache."""
        view = BlocksView(group, "device", "stored", frozen(keys), frozen(info.parent), frozen(info.depth))
        self.manager.notify("minivllm_stored", blocks=view)

    def _evicted(self, group: int, keys: np.ndarray) -> None:
        """Call the hooks for evicted blocks."""
        view = _gone(group, "evicted", keys)
        self.manager.notify("minivllm_evicted", blocks=view)
        self.manager.notify("minivllm_removed", blocks=view)

    def _dropped(self, group: int, keys: np.ndarray) -> None:
        """Call the hooks for blocks that left the prefix cache without an eviction."""
        if len(keys):
            self.manager.notify("minivllm_removed", blocks=_gone(group, "dropped", keys))


NO_DEPTH = np.empty(0, np.int32)


def _gone(group: int, reason: str, keys: np.ndarray) -> BlocksView:
    """Return a view of blocks that left the prefix cache.  The keys are copied, because the evictor may reuse them."""
    gone = frozen(np.array(keys, np.uint64))
    return BlocksView(group, "device", reason, gone, gone[:0], frozen(NO_DEPTH))


def frozen(a: np.ndarray) -> np.ndarray:
    """Return a read-only view of an array that is never written again."""
    view = a.view()
    view.flags.writeable = False
    return view


def view_of(request: Request) -> RequestView:
    """Return the view of a request."""
    return RequestView(
        request.id,
        tuple(s.id for s in request.sequences),
        frozen(request.prompt),
        _sealed(vars(request.params)),
        request.arrival,
    )


def _sealed(value: Any) -> Any:
    """Return a read-only form of a parameter, because the engine reads the same mappings and lists."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: _sealed(inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(map(_sealed, value))
    return value
