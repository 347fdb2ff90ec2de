"""Admit new requests together if the wait is worthwhile, else at once.

A step that computes prompts delays all decoding rows by a fixed time (another launch, another shape) and by a time for
each token.  Requests that are admitted together share the fixed time.  With arrivals at a rate r, R decoding rows and
a fixed time c, admitting k requests at a time costs (k - 1) / 2 of waiting and r R c / k of delays, in request-seconds
per second.  The sum is least at k = sqrt(2 r R c), the economic lot (Harris, "How Many Parts to Make at Once", 1913).
Targets limit the wait.

c is learned from the times of windows of steps, by least squares with decreasing weights::

    seconds of a window = a * steps  +  c * steps with prompts  +  b * tokens of prompts

If the last two terms cannot be separated, since all prompts are alike and each is alone in its step, the time is
attributed to the tokens.  Then no request waits.
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

RECENT = 64  # number of recent requests whose times and targets are used
WINDOW = 8  # number of steps whose times are added up to one measurement (a window)
ENOUGH = 8  # number of measured windows, and of arrived requests, before which no request waits
KEPT = 0.98  # each new window multiplies the weight of the earlier ones by this factor
DOUBT = np.array([1e-6, 0.05, 1e-3])  # ridge penalty of each of the three times, as a share of its evidence
TOKENS = 64.0  # prompt tokens are counted in units of this many, so that the columns have similar sizes


class Adaptive(SchedulerPolicy):
    """First come, first served, with a learned wait before admissions.  No request waits while no row decodes.

    No request starves, since the order is by arrival and the oldest waits at most ``max_hold`` seconds.
    """

    options: AdaptiveOptions

    def __init__(self, options: Any, ctx: SchedulerContext) -> None:
        super().__init__(options or AdaptiveOptions(), ctx)
        self.arrivals: deque[float] = deque(maxlen=RECENT)
        # for recent requests, seconds until the first token is due; inf without a target
        self.targets: deque[float] = deque(maxlen=RECENT)
        self.seen = np.zeros((3, 3))  # matrix of the normal equations, added up over the windows
        self.took = np.zeros(3)  # right side of the normal equations
        self.windows = 0
        self.held = 0
        self.times = np.zeros(3)  # learned seconds of a step, of having prompts in a step, and of TOKENS prompt tokens
        self.begun = 0.0  # time at which the present window began
        self.counted = [0.0, 0.0, 0.0]  # counts in the present window: steps, steps with prompts, and prompt tokens
        self.was = 0  # count of running rows at the last plan
        self.gone = 0  # count of sequences that have ended since the last plan
        self.prefilled = False  # whether the last plan computed prompts of rows that were already running
        # for the requests that the last plan could admit, in order, their count of prompt tokens to compute
        self.uncomputed: list[float] = []
        self.wanted = 1.0  # how many new requests should be admitted together

    # ---- learning ----------------------------------------------------------------------------------------------

    def key(self, new: QueueView) -> np.ndarray:
        first = new.preempted == 0  # preempted requests have been counted before
        arrival = new.arrival[first]
        target = new.ttft_due[first] - arrival
        self.arrivals.extend(arrival.tolist())
        self.targets.extend(target.tolist())
        return new.arrival

    def ended(self, gone: QueueView) -> None:
        self.gone += len(gone)

    def order(self, head: QueueView, running: QueueView, now: float) -> np.ndarray:
        index = np.lexsort((head.id, head.arrival))
        uncached = np.maximum(head.known - head.cached, 1)
        self.uncomputed = uncached[index].tolist()
        return index

    def _look(self, load: Load, now: float) -> None:
        """Add the step that was planned last to the present window, and learn the times when the window is complete."""
        entered = 0
        if self.uncomputed:
            entered = max(0, load.running - self.was + self.gone)
        if not self.was and not entered:
            self._begin_window(now)
        else:
            self.counted[0] += 1.0
            self.counted[1] += self.prefilled or entered > 0
            self.counted[2] += sum(self.uncomputed[:entered]) / TOKENS
            if self.counted[0] >= WINDOW:
                self._fit(now - self.begun)
                self._begin_window(now)
        self.was = load.running
        self.gone = 0
        self.prefilled = load.prefilling > 0
        self.uncomputed = []

    def _begin_window(self, now: float) -> None:
        self.begun = now
        self.counted = [0.0, 0.0, 0.0]

    def _fit(self, seconds: float) -> None:
        """Update the learned times with a window that took some seconds."""
        x = np.array(self.counted)
        self.seen = KEPT * self.seen + np.outer(x, x)
        self.took = KEPT * self.took + x * seconds
        self.windows += 1
        doubt = np.diag(DOUBT * self.seen.diagonal() + 1e-9)
        times = np.linalg.solve(self.seen + doubt, self.took)
        self.times = np.maximum(times, 0.0)

    def _rate(self, now: float) -> float:
        """Return the recent arrivals per second, or 0 if there were too few."""
        if len(self.arrivals) < ENOUGH:
            return 0.0
        span = max(now - self.arrivals[0], 1e-6)
        return (len(self.arrivals) - 1) / span

    # ---- decisions ---------------------------------------------------------------------------------------------

    def shape(self, load: Load, now: float) -> StepShape:
        self._look(load, now)
        decoding = load.running - load.prefilling
        rate = self._rate(now)
        fixed = float(self.times[1]) if self.windows >= ENOUGH else 0.0
        lot = math.sqrt(2.0 * rate * max(decoding, 0) * fixed)
        free_rows = float(self.ctx.max_num_seqs - load.running)
        self.wanted = max(1.0, min(lot, free_rows))
        if not load.waiting or load.prefilling or decoding <= 0:
            return StepShape()
        most = self._most()
        wait = 0.0
        if rate > 0:
            wait = min((self.wanted - 1.0) / rate, most)
        if fixed > load.tpot_slack > 0:  # prompts would delay a token past its target
            wait = most
        elif load.waiting >= self.wanted:
            wait = 0.0
        if load.oldest_wait >= wait:
            return StepShape()
        self.held += 1
        return StepShape(hold_until=now + wait - load.oldest_wait)

    def _most(self) -> float:
        """Return the longest time in seconds for which a new request may be held back, derived from the tightest
        recent target."""
        target = np.inf
        if self.options.default_ttft_ms is not None:
            target = self.options.default_ttft_ms / 1e3
        tightest = min([*self.targets, target])
        share = self.options.ttft_share * max(tightest, 0.0)
        return float(min(self.options.max_hold, share))

    def figures(self) -> Mapping[str, float]:
        """Return counters and learned values of the policy.

        ``batch_wanted`` is the number of requests to start together in the last plan.  ``step_ms``, ``prompts_ms`` and
        ``token_us`` are learned times.  ``held`` counts the plans that held new requests back."""
        step, prompts, tokens = self.times.tolist()
        return {
            "batch_wanted": self.wanted,
            "step_ms": 1e3 * step,
            "prompts_ms": 1e3 * prompts,
            "token_us": 1e6 * tokens / TOKENS,
            "held": float(self.held),
        }
