"""Give tenants fair shares: serve the tenant with the least counter of service next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv:2401.00588
(algorithms 2 and 4).  Tokens of a prompt count when its request is admitted, generated tokens when they are generated.
A tenant that returns to the queue is raised to the least counter in the queue, so that absence saves up no service.
While two tenants wait, the difference of their service has a bound that does not grow with time (theorem 4.4).

Two rules differ from the paper.  A tenant is raised when its request arrives, to the least counter of the tenants in
the last call of ``order``.  A request that has waited ``max_wait`` seconds precedes all others.  With counters alone, a
stream of new tenants, which start at the least counter, would starve the tenants above it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import FairOptions

if TYPE_CHECKING:
    from typing import Any

FEW = 65536  # largest number of pairs for which comparing all pairs is faster than sorting
SPARE = 1024  # number of counters that are kept for tenants without waiting or running requests


class Fair(SchedulerPolicy):
    """A policy with a part of the queue (``lane``) for each tenant, in order of arrival.

    Many requests of a tenant therefore cannot hide those of others.  Invariant: ``counter[place[t]]`` is the service of
    tenant t plus the amounts by which it was raised.  ``ids`` are the admitted sequences that have not ended, ``paid``
    is the part of the counter that each has caused, and ``owner`` is the place of its tenant.
    """

    options: FairOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or FairOptions(), ctx)
        self.place: dict[int, int] = {}  # tenant -> its index in ``counter``
        self.counter = np.zeros(64)
        self.ids = np.empty(0, np.int64)
        self.paid = np.empty(0)
        self.owner = np.empty(0, np.int64)
        self.active: set[int] = set()  # tenants with a waiting request
        self.floor = 0.0  # least counter among the tenants with a waiting request, now or the last time there were any

    def key(self, new: QueueView) -> np.ndarray:
        for tenant in new.tenant.tolist():
            if tenant not in self.active:
                self.active.add(tenant)
                at = self._place(tenant)
                self.counter[at] = max(self.counter[at], self.floor)
        return new.arrival

    def lane(self, new: QueueView) -> np.ndarray:
        return new.tenant

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        self._charge(running)
        line = np.lexsort((head.id, head.arrival, head.tenant))  # sorted by tenant, and the requests of a tenant by age
        tenant = head.tenant[line]
        is_first = np.ones(len(line), bool)
        is_first[1:] = tenant[1:] != tenant[:-1]
        edges = np.flatnonzero(is_first)
        tenants = tenant[edges]
        names = tenants.tolist()
        start = edges.tolist()
        end = [*start[1:], len(line)]
        # ``head`` holds a request of every waiting tenant if it has fewer tenants than its bound
        if len(names) < self.window:
            self.active = set(names)
        self._forget()
        places = [self.place[t] if t in self.place else self._place(t) for t in names]
        counters = self.counter[places].tolist()
        self.floor = min(counters)
        cost = self.options.input_cost * head.prompt
        again = np.flatnonzero(head.preempted)
        _, charged = self._find(head.id[again])
        cost[again[charged]] = 0.0  # its prompt was charged before the preemption
        chosen: list[int] = []
        old = np.flatnonzero(now - head.arrival > self.options.max_wait)
        if len(old):
            late = head.take(old)  # requests that have waited longer than ``max_wait``
            oldest_first = np.lexsort((late.id, late.arrival))
            chosen = old[oldest_first].tolist()
            groups = np.searchsorted(tenants, head.tenant[chosen])
            for i, g in zip(chosen, groups.tolist(), strict=True):
                start[g] += 1  # the tenant's requests are served in the order of their arrival
                counters[g] += cost[i]
        next_up = []
        for g, counter in enumerate(counters):
            if start[g] < end[g]:
                next_up.append((counter, g))
        heapq.heapify(next_up)
        rows = max(self.ctx.max_num_seqs - len(running), 1)
        while next_up and len(chosen) < rows:  # a step cannot admit more requests than rows
            counter, g = next_up[0]
            at = int(line[start[g]])
            chosen.append(at)
            start[g] += 1
            if start[g] < end[g]:
                heapq.heapreplace(next_up, (counter + cost[at], g))
            else:
                heapq.heappop(next_up)
        return np.array(chosen, np.int64)

    def ended(self, gone: QueueView) -> None:
        _, charged = self._find(gone.id)
        ran = charged | (gone.known > gone.prompt)  # requests that ended without being served cost nothing
        at = self._charge(gone if ran.all() else gone.take(ran))
        stay = np.ones(len(self.ids), bool)
        stay[at] = False
        self.ids = self.ids[stay]
        self.paid = self.paid[stay]
        self.owner = self.owner[stay]

    def victim(self, candidates: QueueView, need: int) -> int:
        at = self._charge(candidates)  # called before ``owner`` is read, because it may replace that array
        had = self.counter[self.owner[at]]
        order = np.lexsort((candidates.id, candidates.arrival, had))
        return int(order[-1])

    def figures(self) -> Mapping[str, float]:
        """Return figures of the policy.

        ``tenants`` is the number of tenants with a counter, and ``waiting`` the number of these with a waiting request.
        ``floor`` is the smallest counter, in tokens of service, of the tenants that wait or waited last.  ``lead`` is
        the number of tokens by which the largest counter exceeds the floor.
        """
        counters = self.counter[list(self.place.values())]
        largest = float(counters.max(initial=0.0))
        lead = max(largest - self.floor, 0.0)
        return {"tenants": len(self.place), "waiting": len(self.active), "floor": self.floor, "lead": lead}

    def _charge(self, view: QueueView) -> np.ndarray:
        """Add the service that these sequences have had since the last call to the counters of their tenants.  Return
        their indices in ``ids``."""
        at, known = self._find(view.id)
        fresh = np.flatnonzero(~known)
        new = len(fresh)
        if new:
            places = [self._place(t) for t in view.tenant[fresh].tolist()]
            at[fresh] = len(self.ids) + np.arange(new)
            self.ids = np.append(self.ids, view.id[fresh])
            self.paid = np.append(self.paid, np.zeros(new))
            self.owner = np.append(self.owner, np.array(places, np.int64))
        output = view.known - view.prompt
        total = self.options.input_cost * view.prompt + self.options.output_cost * output
        more = np.maximum(total - self.paid[at], 0)
        self.paid[at] += more
        owners = self.owner[at]
        self.counter += np.bincount(owners, more, len(self.counter))
        return at

    def _find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each sequence of ``ids`` its index in ``self.ids``, and bool [n] whether it is there.

        A sequence that is there was charged before.  The index of another sequence has no meaning.
        """
        n = len(self.ids)
        m = len(ids)
        if n <= m and (ids[:n] == self.ids).all():  # usual for running rows: the known sequences come first
            every = np.arange(m)
            return every, every < n
        if n * m <= FEW:
            same = ids[:, None] == self.ids
            return same.argmax(axis=1), same.any(axis=1)
        by_id = np.argsort(self.ids)
        rank = np.searchsorted(self.ids, ids, sorter=by_id)
        at = by_id[np.minimum(rank, n - 1)]
        return at, self.ids[at] == ids

    def _place(self, tenant: int) -> int:
        """Return the index of a tenant in ``counter``.  A new tenant starts at the floor."""
        at = self.place.get(tenant)
        if at is None:
            at = self.place[tenant] = len(self.place)
            if at == len(self.counter):
                self.counter = np.concatenate([self.counter, np.zeros(at)])
            self.counter[at] = self.floor
        return at

    def _forget(self) -> None:
        """Drop counters of tenants that neither wait nor run.  Counters that are furthest above the floor are kept."""
        used = len(self.active) + len(self.ids)
        if len(self.place) <= used + 2 * SPARE:
            return
        running = set(self.owner.tolist())
        idle = []
        for tenant, at in self.place.items():
            if tenant not in self.active and at not in running:
                idle.append((self.counter[at], tenant))
        kept = dict(self.place)
        for _, tenant in heapq.nsmallest(len(idle) - SPARE, idle):
            del kept[tenant]
        old_places = list(kept.values())
        n = len(kept)
        moved = np.zeros(len(self.place), np.int64)
        moved[old_places] = np.arange(n)
        counter = np.zeros(max(64, n))
        counter[:n] = self.counter[old_places]
        self.place = {tenant: i for i, tenant in enumerate(kept)}
        self.counter = counter
        self.owner = moved[self.owner]
