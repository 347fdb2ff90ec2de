"""Serve the request with the least slack first: by the latest start with which its first token is in time.

The slack is the due time minus the work before it (Mok, "Fundamental Design Problems of Distributed Systems for the
Hard-Real-Time Environment", 1983).  Waiting reduces the slack of all requests equally, so due - work keeps its order
and is the key.  Under overload such an order serves requests that are just too late.  Late requests are therefore put
behind the others, as in schedulers for goodput (Zhong et al., "DistServe", OSDI 2024, arXiv:2401.09670).

A target for the time per output token limits the prefill tokens of a step with decodes (Agrawal et al.,
"Sarathi-Serve", OSDI 2024, arXiv:2403.02310).  The limit adapts: it is halved when a step takes most of the time to the
tightest target, and raised by an eighth while prompts are computed and steps are shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape

from .options import DeadlineOptions

if TYPE_CHECKING:
    from typing import Any

IDLE = 1.0  # if two plans are this many seconds apart, the engine was idle between them
MOST = 0.8  # a step may take this share of the time until a token is due


class Deadline(SchedulerPolicy):
    """A policy that serves the request with the least slack first.  It uses the targets ``ttft_ms`` and ``tpot_ms`` of
    requests, and the deadlines of their sessions.

    No request starves.  Requests that have waited ``max_wait`` seconds precede all others, by arrival, and a step
    computes at least ``min_chunk`` tokens of a prompt."""

    options: DeadlineOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or DeadlineOptions(), ctx)
        self.preemptive = self.options.preempt
        self.cap = float(ctx.max_num_batched_tokens)
        self.last = -np.inf  # time of the last plan

    def key(self, new: QueueView) -> np.ndarray:
        usual = new.arrival + self.options.default_ttft_ms / 1e3
        answer = new.predicted_out / self.options.decode_rate
        start = new.deadline - answer
        due = np.minimum(new.ttft_due, start)
        known = np.isfinite(due)
        due = np.where(known, due, usual)
        return due - new.prompt / self.options.prefill_rate

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        start = self.key(head)
        old = now - head.arrival > self.options.max_wait
        started = head.known > head.prompt  # preempted requests, whose clients already have tokens
        late = (start < now) & ~started
        rank = np.where(late, 2, 1)
        rank[old] = 0
        begin = np.where(old, head.arrival, start)
        return np.lexsort((head.id, begin, rank))

    def shape(self, load: Load, now: float) -> StepShape:
        took = now - self.last
        self.last = now
        top = self.ctx.max_num_batched_tokens
        if load.tpot_slack == np.inf:
            self.cap = float(top)
            return StepShape()
        floor = min(self.options.min_chunk, top)
        if MOST * load.tpot_slack < took < IDLE:
            self.cap = max(self.cap / 2, floor)
        elif load.prefilling:
            self.cap = min(self.cap * 1.125, top)
        return StepShape(prefill_cap=int(self.cap))

    def displaced(self, head: QueueView, running: QueueView, now: float) -> int:
        target = head.ttft_due[0]
        started = head.known[0] > head.prompt[0]  # the request has its first token and was preempted
        late = now > self.key(head)[0]
        if target == np.inf or started or late:
            return -1
        due = self.due(running)
        last = int(np.argmax(due))
        if due[last] <= target:
            return -1
        return last

    def due(self, rows: QueueView) -> np.ndarray:
        """Return the time at which the next token of each row is due, f64 [n]."""
        return np.where(rows.known > rows.prompt, rows.tpot_due, rows.ttft_due)

    def victim(self, candidates: QueueView, need: int) -> int:
        due = self.due(candidates)
        latest_last = np.lexsort((candidates.id, candidates.arrival, due))
        return int(latest_last[-1])
