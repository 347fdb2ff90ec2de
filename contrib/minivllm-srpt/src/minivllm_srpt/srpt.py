"""Shortest remaining predicted time first, with limited preemption and a bounded wait.

The request with the least predicted work left is served first (shortest-predicted-job-first; "Efficient LLM Scheduling
by Learning to Rank", Fu et al., NeurIPS 2024, arXiv:2408.15792, and TRAIL, "Don't Stop Me Now: Embedding Based
Scheduling for LLMs", Shahout et al., ICLR 2025, arXiv:2410.01035).  The bound is from the first paper: a request that
has waited ``max_wait`` seconds goes before all requests that have waited less.  From the second paper come a
prediction that shrinks while a request runs, and limited preemption: a request that is nearly done is not preempted.
Both papers predict the length of an answer from the model's hidden states.  A policy has no hidden states, so here the
length is learned from earlier answers (``lengths``), and is never more than the engine expects
(``QueueView.predicted_out``).
"""

from __future__ import annotations

import numpy as np

from minivllm.plugin import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape

from .lengths import Lengths
from .options import SrptOptions


class Srpt(SchedulerPolicy):
    """Order the waiting requests by their predicted remaining work.

    Keys are arrival times, so ``order`` gets the ``window`` oldest requests, and chooses among them.  No request
    starves: a waiting request becomes one of the oldest, then overdue, and overdue requests go by arrival.  The oldest
    running request is never preempted while another one can be.
    """

    options: SrptOptions

    def __init__(self, options: SrptOptions | None, ctx: SchedulerContext) -> None:
        super().__init__(options or SrptOptions(), ctx)
        self.lengths = Lengths(self.options.least_seen)
        self.steps = self.seen = 0  # number of planned steps, and the last step at which ``order`` was called

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        if self.options.learn:
            if self.seen < self.steps - 1:
                self.lengths.lose_sight()
            self.lengths.watch(running.id, running.tenant, running.prompt, running.known)
            self.seen = self.steps
        waits = now - head.arrival <= self.options.max_wait  # False sorts first
        by = np.where(waits, self.work(head), head.arrival)
        return np.lexsort((head.id, by, waits)).astype(np.int32)

    def shape(self, load: Load, now: float) -> StepShape:
        """Return the default shape, and count the steps."""
        self.steps += 1
        return super().shape(load, now)

    def victim(self, candidates: QueueView, need: int) -> int:
        """Return the row with the most work left that is neither nearly done nor the oldest."""
        made = candidates.known - candidates.prompt
        young = made < self.options.preemptible * self.expected(candidates)
        young[np.lexsort((candidates.id, candidates.arrival))[0]] = False
        work = self.work(candidates)
        if young.any():
            index = int(np.argmax(np.where(young, work, -np.inf)))
        else:
            index = int(np.lexsort((candidates.id, candidates.arrival))[-1])
        self.lengths.forget(int(candidates.id[index]))
        return index

    def expected(self, view: QueueView) -> np.ndarray:
        """Return expected output tokens f64 [n]; twice the present number for a row beyond its prediction."""
        made = view.known - view.prompt
        guess = self.lengths.predict(view.tenant, view.prompt, view.predicted_out)
        return np.minimum(np.where(made >= guess, 2 * made + 1, guess), np.maximum(view.max_out, 1))

    def work(self, view: QueueView) -> np.ndarray:
        """Return the remaining work f64 [n], in tokens to generate."""
        left = np.maximum(self.expected(view) - (view.known - view.prompt), 1)
        to_compute = np.maximum(view.known - np.maximum(view.computed, view.cached), 0)
        return left + self.options.prefill_cost * to_compute
