"""Least slack first: by the time at which a request has to start so that its first token is in time.

Least slack (Mok, "Fundamental Design Problems of Distributed Systems for the Hard-Real-Time Environment", 1983): due
time less the work before it.  Waiting takes the same slack from all, so due - work keeps its order and is the key.  Any
such order collapses under overload, when it serves those that are just too late; so those are put behind the others, as
schedulers for goodput do (Zhong et al., "DistServe", OSDI 2024, arXiv:2401.09670, say why goodput is what counts).

A target for the time per output token bounds how much prefill a step may hold beside the decodes (Agrawal et al.,
"Sarathi-Serve", OSDI 2024, arXiv:2403.02310); the cap is found by trying: halved when a step takes most of the time
that the tightest target leaves, raised by an eighth while prompts are computed and steps do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape

from .options import DeadlineOptions

if TYPE_CHECKING:
    from typing import Any

IDLE = 1.0  # seconds between two plans that no step takes: nothing was there to do
MOST = 0.8  # of the time until a token is due


class Deadline(SchedulerPolicy):
    """Targets are ``ttft_ms`` and ``tpot_ms`` of the request.

    No starvation: who has waited ``max_wait`` seconds goes first, by arrival; and a prompt is always computed by
    ``min_chunk`` tokens a step at least.
    """

    options: DeadlineOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or DeadlineOptions(), ctx)
        self.cap = float(ctx.max_num_batched_tokens)
        self.last = -np.inf  # when the last step was planned

    def key(self, new: QueueView) -> np.ndarray:
        usual = new.arrival + self.options.default_ttft_ms / 1e3
        return np.where(np.isfinite(new.ttft_due), new.ttft_due, usual) - new.prompt / self.options.prefill_rate

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        start = self.key(head)
        old = now - head.arrival > self.options.max_wait
        started = head.known > head.prompt  # it was preempted, and somebody waits for its next token
        late = (start < now) & ~started
        rank = np.where(old, 0, np.where(late, 2, 1))
        return np.lexsort((head.id, np.where(old, head.arrival, start), rank))

    def shape(self, load: Load, now: float) -> StepShape:
        took, self.last = now - self.last, now
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

    def victim(self, candidates: QueueView, need: int) -> int:
        due = np.where(candidates.known > candidates.prompt, candidates.tpot_due, candidates.ttft_due)
        return int(np.lexsort((candidates.id, candidates.arrival, due))[-1])
