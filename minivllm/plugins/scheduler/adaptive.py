"""Wait or go: newcomers are let in together where that is worth the wait, and at once where it is not.

A step that computes prompts makes all rows that decode wait: by a fixed time (another launch, another shape) and by a
time for each token.  Newcomers that enter together share the fixed one.  With arrivals at a rate r, R rows that decode
and a fixed time c, letting k in at a time costs (k - 1) / 2 of waiting and r R c / k of stalls, in request-seconds a
second; it is least at k = sqrt(2 r R c), the economic lot (Harris, "How Many Parts to Make at Once", 1913).  Targets
bound the wait.

c is learned from the time that windows of steps took, by least squares that forget::

    seconds of a window = a * steps  +  c * steps with prompts  +  b * tokens of prompts

Where the two latter cannot be told apart (every prompt alike, each alone) the tokens get the blame, so that nobody
waits on suspicion.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape

from .options import AdaptiveOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

RECENT = 64  # newcomers whose times and targets count
WINDOW, ENOUGH = 8, 8  # steps of a window; windows, and newcomers, before anybody waits
KEPT = 0.98  # of what was learned, with each window
DOUBT = np.array([1e-6, 0.05, 1e-3])  # by how much each of the three times is shrunk, as a share of what shows it
TOKENS = 64.0  # a unit of prompt tokens, so that the columns are of one size


class Adaptive(SchedulerPolicy):
    """First come, first served, with a learned wait before newcomers enter; nobody waits where no row decodes.

    No starvation: by arrival, and the oldest is held back for ``max_hold`` seconds at most.
    """

    options: AdaptiveOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or AdaptiveOptions(), ctx)
        self.arrivals: deque[float] = deque(maxlen=RECENT)
        self.targets: deque[float] = deque(maxlen=RECENT)  # seconds to a first token, inf = none
        self.seen, self.took = np.zeros((3, 3)), np.zeros(3)  # normal equations of the windows
        self.windows, self.held = 0, 0
        self.times = np.zeros(3)  # seconds: of a step, of prompts in it, of TOKENS of these
        self.begun, self.counted = 0.0, [0.0, 0.0, 0.0]
        self.was = self.gone = 0  # rows that ran at the last plan; sequences that ended since
        self.prefilled = False  # it computed prompts of rows that ran already
        self.asked: list[float] = []  # prompt tokens of those that could enter in it, in order
        self.wanted = 1.0  # newcomers at a time

    # ---- what is learned -----------------------------------------------------------------------------------------

    def key(self, new: QueueView) -> np.ndarray:
        first = new.preempted == 0  # the others have come before
        self.arrivals.extend(new.arrival[first].tolist())
        self.targets.extend((new.ttft_due - new.arrival)[first].tolist())
        return new.arrival

    def ended(self, gone: QueueView) -> None:
        self.gone += len(gone)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        index = np.lexsort((head.id, head.arrival))
        self.asked = np.maximum(head.known - head.cached, 1)[index].tolist()
        return index

    def _look(self, load: Load, now: float) -> None:
        """Count the step that was planned last, and fit the times at the end of each window."""
        entered = max(0, load.running - self.was + self.gone) if self.asked else 0
        if not self.was and not entered:
            self.begun, self.counted = now, [0.0, 0.0, 0.0]
        else:
            self.counted[0] += 1.0
            self.counted[1] += self.prefilled or entered > 0
            self.counted[2] += sum(self.asked[:entered]) / TOKENS
            if self.counted[0] >= WINDOW:
                self._fit(now - self.begun)
                self.begun, self.counted = now, [0.0, 0.0, 0.0]
        self.was, self.gone, self.prefilled, self.asked = load.running, 0, load.prefilling > 0, []

    def _fit(self, seconds: float) -> None:
        x = np.array(self.counted)
        self.seen = KEPT * self.seen + np.outer(x, x)
        self.took = KEPT * self.took + x * seconds
        self.windows += 1
        doubt = np.diag(DOUBT * self.seen.diagonal() + 1e-9)
        self.times = np.maximum(np.linalg.solve(self.seen + doubt, self.took), 0.0)

    def _rate(self, now: float) -> float:
        """Return the recent arrivals per second, or 0 if there were too few."""
        if len(self.arrivals) < ENOUGH:
            return 0.0
        return (len(self.arrivals) - 1) / max(now - self.arrivals[0], 1e-6)

    # ---- what is decided -----------------------------------------------------------------------------------------

    def shape(self, load: Load, now: float) -> StepShape:
        self._look(load, now)
        decoding, rate = load.running - load.prefilling, self._rate(now)
        fixed = float(self.times[1]) if self.windows >= ENOUGH else 0.0
        lot = math.sqrt(2.0 * rate * max(decoding, 0) * fixed)
        self.wanted = max(1.0, min(lot, float(self.ctx.max_num_seqs - load.running)))
        if not load.waiting or load.prefilling or decoding <= 0:
            return StepShape()
        most = self._most()
        wait = min((self.wanted - 1.0) / rate, most) if rate > 0 else 0.0
        if fixed > load.tpot_slack > 0:  # a row would miss its next token: as long as the newcomers can bear
            wait = most
        elif load.waiting >= self.wanted:
            wait = 0.0
        if load.oldest_wait >= wait:
            return StepShape()
        self.held += 1
        return StepShape(hold_until=now + wait - load.oldest_wait)

    def _most(self) -> float:
        """Return the longest time in seconds for which a new request may be held back.  It follows from the
        tightest recent target."""
        usual = np.inf if self.options.default_ttft_ms is None else self.options.default_ttft_ms / 1e3
        target = min((min(one, usual) for one in self.targets), default=usual)
        return float(min(self.options.max_hold, self.options.ttft_share * max(target, 0.0)))

    def figures(self) -> Mapping[str, float]:
        """Return ``batch_wanted``, the number of requests to start together in the last plan; the learned times
        ``step_ms``, ``prompts_ms`` and ``token_us``; and ``held``, the plans that held new requests back."""
        step, prompts, tokens = self.times.tolist()
        return {
            "batch_wanted": self.wanted,
            "step_ms": 1e3 * step,
            "prompts_ms": 1e3 * prompts,
            "token_us": 1e6 * tokens / TOKENS,
            "held": float(self.held),
        }
