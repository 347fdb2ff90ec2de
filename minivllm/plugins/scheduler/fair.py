"""Fair shares among tenants: a counter of service for each, and the one with the least is served next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv:2401.00588
(algorithms 2 and 4): tokens of prompts count when a request is admitted, generated tokens as they come; a tenant that
comes back to the queue is lifted to the least counter there, so that nobody saves up service by staying away.  While
two tenants wait, what they have been served differs by a bound that does not grow with time (theorem 4.4).

Two things differ from the paper.  A tenant is lifted when its request arrives, to the least counter of those that were
shown to ``order`` last.  And a request that has waited ``max_wait`` seconds goes first: with counters alone a stream of
ever new tenants, each lifted to the least, starves those that are above it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import FairOptions

if TYPE_CHECKING:
    from typing import Any

SPARE = 1024  # tenants that do not wait whose counters are remembered


class Fair(SchedulerPolicy):
    """Each tenant has a lane of the queue, so that a flood of one hides nobody; inside a lane it is by arrival.

    Invariant: ``counter[t]`` is the service of tenant t plus what it was lifted by; ``paid`` is the part of
    it that is due to each sequence of ``ids`` (sorted), those that were admitted and have not ended.
    """

    options: FairOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or FairOptions(), ctx)
        self.counter: dict[int, float] = {}
        self.ids, self.paid = np.empty(0, np.int64), np.empty(0)
        self.active: set[int] = set()  # tenants that wait, as far as is known
        self.floor = 0.0  # the least counter of those that wait, or waited last

    def key(self, new: QueueView) -> np.ndarray:
        for tenant in new.tenant.tolist():
            if tenant not in self.active:
                self.active.add(tenant)
                self.counter[tenant] = max(self.counter.get(tenant, 0.0), self.floor)
        return new.arrival

    def lane(self, new: QueueView) -> np.ndarray:
        return new.tenant

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        self._charge(running)
        by_age = np.lexsort((head.id, head.arrival))
        tenant, old = head.tenant.tolist(), by_age[now - head.arrival[by_age] > self.options.max_wait].tolist()
        lanes: dict[int, list[int]] = {}  # tenant -> indices into head, the next one last
        for i in by_age[::-1].tolist():
            lanes.setdefault(tenant[i], []).append(i)
        if len(lanes) < self.window:  # else there may be tenants whom we have not been shown
            self.active = set(lanes)
        self._forget()
        self.floor = min(self.counter[t] for t in lanes)
        # what is preempted has been charged for its prompt
        cost = np.where(self._admitted(head.id), 0.0, self.options.input_cost * head.prompt).tolist()
        counters = {t: self.counter[t] for t in lanes}
        for i in old:
            lanes[tenant[i]].pop()  # the oldest of a lane are its next ones
            counters[tenant[i]] += cost[i]
        next_up = [(c, t) for t, c in counters.items()]
        heapq.heapify(next_up)
        chosen, rows = old, max(self.ctx.max_num_seqs - len(running), 1)
        while next_up and len(chosen) < rows:  # more than there are rows cannot be admitted
            counter, t = heapq.heappop(next_up)
            if lanes[t]:
                chosen.append(lanes[t].pop())
                heapq.heappush(next_up, (counter + cost[chosen[-1]], t))
        return np.array(chosen, np.int64)

    def ended(self, gone: QueueView) -> None:
        ran = self._admitted(gone.id) | (gone.known > gone.prompt)  # the others have never been served
        self._charge(gone.take(ran))
        stay = ~np.isin(self.ids, gone.id)
        self.ids, self.paid = self.ids[stay], self.paid[stay]

    def victim(self, candidates: QueueView, need: int) -> int:
        self._charge(candidates)
        had = np.array([self.counter[t] for t in candidates.tenant.tolist()])
        return int(np.lexsort((candidates.id, candidates.arrival, had))[-1])

    def _charge(self, view: QueueView) -> None:
        """Count what these sequences have been served since they were charged last."""
        fresh = view.id[~self._admitted(view.id)]
        if len(fresh):
            ids = np.concatenate([self.ids, fresh])
            by_id = np.argsort(ids)
            self.ids, self.paid = ids[by_id], np.concatenate([self.paid, np.zeros(len(fresh))])[by_id]
        at = np.searchsorted(self.ids, view.id)
        total = self.options.input_cost * view.prompt + self.options.output_cost * (view.known - view.prompt)
        more = np.maximum(total - self.paid[at], 0)
        self.paid[at] += more
        tenants, place = np.unique(view.tenant, return_inverse=True)
        for tenant, service in zip(tenants.tolist(), np.bincount(place, more).tolist(), strict=True):
            self.counter[tenant] = self.counter.get(tenant, self.floor) + service

    def _admitted(self, ids: np.ndarray) -> np.ndarray:
        """Which of these sequences have been charged, bool [n]."""
        if not len(self.ids):
            return np.zeros(len(ids), bool)
        return self.ids[np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)] == ids

    def _forget(self) -> None:
        """Of those who do not wait, keep the counters that are furthest above the floor."""
        if len(self.counter) > len(self.active) + 2 * SPARE:
            away = [(c, t) for t, c in self.counter.items() if t not in self.active]
            kept = {t: c for c, t in heapq.nlargest(SPARE, away)}
            self.counter = kept | {t: self.counter[t] for t in self.active}
