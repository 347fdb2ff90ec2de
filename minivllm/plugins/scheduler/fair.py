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
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import QueueView, SchedulerContext, SchedulerPolicy

from .options import FairOptions

if TYPE_CHECKING:
    from typing import Any

FEW = 65536  # comparisons that are made sooner than a table is sorted
SPARE = 1024  # tenants that neither wait nor run whose counters are remembered


class Fair(SchedulerPolicy):
    """Each tenant has a lane of the queue, so that a flood of one hides nobody; inside a lane it is by arrival.

    Invariant: ``counter[place[t]]`` is the service of tenant t plus what it was lifted by; ``paid`` is the part of it
    that is due to each sequence of ``ids``, those that were admitted and have not ended, and ``owner`` the
    place of each one's tenant.
    """

    options: FairOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or FairOptions(), ctx)
        self.place: dict[int, int] = {}  # tenant -> index into counter
        self.counter = np.zeros(64)
        self.ids, self.paid, self.owner = np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64)
        self.active: set[int] = set()  # tenants that wait, as far as is known
        self.floor = 0.0  # the least counter of those that wait, or waited last

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
        line = np.lexsort((head.id, head.arrival, head.tenant))  # tenant after tenant, each by age
        tenant = head.tenant[line]
        edges = np.flatnonzero(np.concatenate(([True], tenant[1:] != tenant[:-1])))
        names, start, end = tenant[edges].tolist(), edges.tolist(), [*edges[1:].tolist(), len(line)]
        if len(names) < self.window:  # else there may be tenants whom we have not been shown
            self.active = set(names)
        self._forget()
        counters = self.counter[[self.place[t] if t in self.place else self._place(t) for t in names]].tolist()
        self.floor = min(counters)
        cost = self.options.input_cost * head.prompt
        again = np.flatnonzero(head.preempted)
        cost[again[self._find(head.id[again])[1]]] = 0.0  # what is preempted has been charged for its prompt
        chosen, old = [], now - head.arrival > self.options.max_wait
        if old.any():
            chosen = np.flatnonzero(old)[np.lexsort((head.id[old], head.arrival[old]))].tolist()
            for i, g in zip(chosen, np.searchsorted(tenant[edges], head.tenant[chosen]).tolist(), strict=True):
                start[g] += 1  # the oldest of a tenant are its next ones
                counters[g] += cost[i]
        next_up = [(c, g) for g, c in enumerate(counters) if start[g] < end[g]]
        heapq.heapify(next_up)
        rows = max(self.ctx.max_num_seqs - len(running), 1)
        while next_up and len(chosen) < rows:  # more than there are rows cannot be admitted
            counter, g = next_up[0]
            chosen.append(int(line[start[g]]))
            start[g] += 1
            if start[g] < end[g]:
                heapq.heapreplace(next_up, (counter + cost[chosen[-1]], g))
            else:
                heapq.heappop(next_up)
        return np.array(chosen, np.int64)

    def ended(self, gone: QueueView) -> None:
        ran = self._find(gone.id)[1] | (gone.known > gone.prompt)  # the others have never been served
        at = self._charge(gone if ran.all() else gone.take(ran))
        stay = np.ones(len(self.ids), bool)
        stay[at] = False
        self.ids, self.paid, self.owner = self.ids[stay], self.paid[stay], self.owner[stay]

    def victim(self, candidates: QueueView, need: int) -> int:
        at = self._charge(candidates)  # which may make ``owner`` longer
        had = self.counter[self.owner[at]]
        return int(np.lexsort((candidates.id, candidates.arrival, had))[-1])

    def figures(self) -> Mapping[str, float]:
        """Return ``tenants``, the number of tenants with a counter; ``waiting``, how many of them are known to have
        a waiting request; ``floor``, the smallest counter, in tokens of service, of the tenants that wait or waited
        last; and ``lead``, by how many tokens the largest counter exceeds the floor."""
        counters = self.counter[list(self.place.values())]
        lead = max(float(counters.max(initial=0.0)) - self.floor, 0.0)
        return {"tenants": len(self.place), "waiting": len(self.active), "floor": self.floor, "lead": lead}

    def _charge(self, view: QueueView) -> np.ndarray:
        """Count what these sequences have been served since they were charged last.  Returns where they are in
        ``ids``."""
        at, known = self._find(view.id)
        fresh = np.flatnonzero(~known)
        if len(fresh):
            owner = np.array([self._place(t) for t in view.tenant[fresh].tolist()], np.int64)
            at[fresh] = len(self.ids) + np.arange(len(fresh))
            self.ids = np.concatenate((self.ids, view.id[fresh]))
            self.paid, self.owner = np.append(self.paid, np.zeros(len(fresh))), np.append(self.owner, owner)
        total = self.options.input_cost * view.prompt + self.options.output_cost * (view.known - view.prompt)
        more = np.maximum(total - self.paid[at], 0)
        self.paid[at] += more
        self.counter += np.bincount(self.owner[at], more, len(self.counter))
        return at

    def _find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the place in ``ids`` of each sequence, and bool [n] whether it is there, which means that it has
        been charged."""
        n, m = len(self.ids), len(ids)
        if n <= m and (ids[:n] == self.ids).all():  # the rows that run, nearly always: newcomers are the last of them
            return np.arange(m), np.arange(m) < n
        if n * m <= FEW:
            same = ids[:, None] == self.ids
            return same.argmax(axis=1), same.any(axis=1)
        by_id = np.argsort(self.ids)
        at = by_id[np.minimum(np.searchsorted(self.ids, ids, sorter=by_id), n - 1)]
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
        """Drop counters of tenants that neither wait nor run, and keep those that are furthest above the floor."""
        if len(self.place) <= len(self.active) + len(self.ids) + 2 * SPARE:
            return
        stay, runs = self.active, set(self.owner.tolist())
        away = [(self.counter[at], t) for t, at in self.place.items() if t not in stay and at not in runs]
        drop = {t for _, t in heapq.nsmallest(len(away) - SPARE, away)}
        kept = [(t, at) for t, at in self.place.items() if t not in drop]
        moved = np.zeros(len(self.place), np.int64)
        moved[[at for _, at in kept]] = np.arange(len(kept))
        counter = np.zeros(max(64, len(kept)))
        counter[: len(kept)] = self.counter[[at for _, at in kept]]
        self.place, self.counter, self.owner = {t: i for i, (t, _) in enumerate(kept)}, counter, moved[self.owner]
