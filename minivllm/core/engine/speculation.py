"""Speculation on the host, which decides the number of drafts in a step and whether speculation is worthwhile.

Drafts are accepted with some probability and cost time; beyond some batch size a step with drafts takes longer than
the accepted tokens save.  Both are measured, for each class of steps: the time of a step without drafts and with k
drafts per row, and the share of rows whose first, second ... draft was accepted.  The class of a step has the number of
decoding rows and the number of prompt tokens beside them, both as powers of two.  The number of drafts is the k with
the largest gain, and speculation is on while this gain is at least 1:

    gain(k) = (1 + share of the first + ... + share of the k-th) * milliseconds without / milliseconds with k

The time of a step is the time between the end of the step before and its own end, so it includes the work of the host
between two steps, in which a device without further work waits.  It is the median of the last steps, because a step in
which a CUDA graph is captured takes a hundred times as long.  Times of a k that was not tried lie on the line between
the neighbouring ones.  A trial begins with the most drafts, whose shares tell those of fewer, and goes on with the best
k until that was timed too.  Where speculation is off it is tried again for a few steps, at first soon and then more and
more rarely.  The cost of a trial determines the wait before the next one.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Capacity, Wiring
    from minivllm.core.interfaces.plan import StepPlan, StepResult

    from .cache import KVCache
    from .request import Request
    from .slots import Slots

log = logging.getLogger("minivllm")
# steps of a trial; the first is not timed, because the preceding step was of the other kind
TRIES = 8
FIRST_WAIT, MOST_WAIT = 32, 512  # steps without drafts until the next trial, at first and at most
RENEW = 512  # steps with drafts after which steps without are timed again
LAST_STEPS = 15  # number of newest steps of a kind whose median time is used
WEIGHT = 0.1  # largest weight of a new step in the running means of the acceptance
MEAN_ROWS = 64  # rows of the newest steps over which the acceptance is averaged, at least
HOPELESS, ENOUGH = 0.7, 3  # a trial ends early below this gain, after this many steps
# the wait before the next trial as a multiple of its duration, so that trials take a twentieth of the time
TRIAL_COST = 20
KEEP = 1.02  # the number of drafts changes only if the gain grows by this factor


class StepClass(NamedTuple):
    """The class of a step: its decoding rows and its prompt tokens, rounded to powers of two (see ``class_of``)."""

    rows: int
    prompt: int

    def __str__(self) -> str:
        rows = _span(self.rows)
        return rows if not self.prompt else f"{rows} beside {_span(self.prompt - 1)} prompt tokens"


def class_of(rows: int, prompt: int) -> StepClass:
    """Return the class of a step with so many decoding rows, drafts not counted, and so many prompt tokens."""
    return StepClass(max(rows - 1, 0).bit_length(), 1 + (prompt - 1).bit_length() if prompt else 0)


def _span(size: int) -> str:
    """Return the numbers whose largest power of two has the exponent ``size``, as text."""
    return f"{(1 << size >> 1) + 1}-{1 << size}" if size > 1 else str(1 << size)


@dataclass
class Class:
    """Measurements of a ``StepClass``, and the decisions that follow: whether its steps have drafts (``on``), and how
    many (``k``).  ``most`` is the limit of drafts of a row."""

    most: int
    ms: dict[int, float] = field(default_factory=dict)  # drafts per row -> milliseconds of a step
    k: int = 0  # drafts of a row while the class speculates
    on: bool = False
    left: int = TRIES  # steps until the next decision
    trial: bool = True  # the current steps are a trial
    wait: int = FIRST_WAIT
    tried: int = 0  # timed steps with drafts in the current trial
    first: bool = True  # the next step is the first after a decision, and is not timed
    # the newest times, whose median is ``ms``
    recent: dict[int, deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.k = self.k or self.most
        # share of rows whose first, second ... draft was accepted together with all earlier drafts
        self.shares = np.zeros(self.most)
        # number of steps in which each share was measured
        self.observed = np.zeros(self.most, np.int64)

    def tokens(self, k: int) -> float:
        """Return the expected tokens of a row in a step with k drafts."""
        return 1.0 + float(self.shares[:k].sum())

    def estimate(self, k: int) -> float:
        """Return the milliseconds of a step with k drafts, interpolated where k was not timed."""
        known = sorted(self.ms)
        times = [self.ms[n] for n in known]
        return float(np.interp(k, known, times))

    def gain_of(self, k: int) -> float:
        """Return the tokens per second with k drafts, divided by the tokens per second without drafts.

        It is 0 before both were measured.
        """
        if 0 not in self.ms or len(self.ms) < 2:
            return 0.0
        return self.tokens(k) * self.ms[0] / self.estimate(k)

    @property
    def gain(self) -> float:
        """Return the gain of the current number of drafts; 0 before it was measured."""
        return self.gain_of(self.k)

    def best(self) -> int:
        """Return the number of drafts with the largest gain.  The current number stays if gains are about equal."""
        gains = {k: self.gain_of(k) for k in range(1, max(self.ms) + 1)}
        best = max(gains, key=lambda k: gains[k])
        return best if gains[best] > KEEP * gains.get(self.k, 0.0) else self.k

    def note(self, drafts: int, ms: float, shares: np.ndarray, rows: int) -> None:
        """Add a step of ``rows`` rows with so many drafts per row to the measurements.

        ``ms`` is its time, and ``shares`` f64 [most] are the shares of its rows that accepted each draft."""
        recent = self.recent.setdefault(drafts, deque(maxlen=LAST_STEPS))
        recent.append(ms)
        self.ms[drafts] = median_low(recent)
        if not drafts:
            return
        self.tried += self.trial
        self.observed[:drafts] += 1
        least = min(WEIGHT, rows / MEAN_ROWS)
        weight = np.maximum(1 / self.observed[:drafts], least)
        self.shares[:drafts] += weight * (shares[:drafts] - self.shares[:drafts])

    def forget(self, drafts: int) -> None:
        """Forget the times of steps with so many drafts, because they are old."""
        self.ms.pop(drafts, None)
        self.recent.pop(drafts, None)

    def turn(self) -> bool:
        """Count down one step.  At 0, decide again whether the class speculates, and with how many drafts.

        Return True if speculation was switched off because it does not pay.
        """
        self.left -= 1
        gain = 0.0
        if self.on:
            gain = max(self.gain_of(k) for k in range(1, self.most + 1))
        early = self.trial and self.left <= TRIES - ENOUGH
        hopeless = early and 0 < gain < HOPELESS
        if self.left > 0 and not hopeless:
            return False
        before = self.on, self.k
        stopped = self._decide(gain)
        self.first = before != (self.on, self.k)
        return stopped

    def _decide(self, gain: float) -> bool:
        """Begin or end a trial, given the largest gain, 0 if none was measured.  Return whether speculation was
        switched off."""
        if not self.on:  # steps without drafts were just timed
            self.on = self.trial = True
            self.left = TRIES
            self.tried = 0
            self.forget(self.k)
            return False
        if gain and gain < 1:
            self._stop()
            return True
        if self.trial and gain and not self._changed():
            self.trial = False
            self.left = RENEW
            self.wait = FIRST_WAIT
            return False
        if not self.trial:  # measure steps without drafts again, and then steps with one more draft
            self.on = False
            self.trial = True
            self.forget(0)
            self.k = min(self.k + 1, self.most)
        self.left = TRIES
        return False

    def _stop(self) -> None:
        """Switch off until the next trial, which uses the number of drafts that lost least."""
        spent = self.tried * self.estimate(self.k)
        self.left = max(self.wait, int(TRIAL_COST * spent / self.ms[0]))
        self.wait = min(2 * self.wait, MOST_WAIT)
        self.on = self.trial = False
        self.k = self.best()

    def _changed(self) -> bool:
        """Choose the best number of drafts, and return whether it still has to be timed."""
        before = self.k
        self.k = self.best()
        return self.k != before and self.k not in self.ms


@dataclass
class Speculation:
    """Counters and decisions of speculation.  ``k`` is the most drafts per row.  ``always`` speculates without
    measuring the gain.  Invariant: ``accepted[j] <= proposed[j]``, both falling in j."""

    k: int
    drafter: str
    always: bool = False
    # for each processor, the sampler last: whether it handles several positions of a row in one step
    able: tuple[bool, ...] = ()
    failed: str = ""  # error of a failed drafter, which is not called any more
    steps: int = 0
    rows: int = 0  # rows with drafts, summed over all steps
    tokens: int = 0  # tokens that these rows received
    ahead: bool = False  # a row may have drafts while a step with it is in flight
    classes: dict[StepClass, Class] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proposed = np.zeros(self.k, np.int64)
        self.accepted = np.zeros(self.k, np.int64)
        self._ended: float | None = None  # when the result of the last step was processed

    @classmethod
    def of(cls, wiring: Wiring, capacity: Capacity) -> Speculation | None:
        """Return the speculation of an engine; None if its wiring has no drafter that drafts."""
        options = wiring.speculation
        if not options.num_speculative_tokens:
            return None
        able = tuple(
            "multi_position" in p.features for p in (*wiring.processors, wiring.parts["sampler"])
        )
        always = options.speculate == "always"
        return cls(
            options.num_speculative_tokens,
            wiring.parts["drafter"].name,
            always,
            able,
            ahead=capacity.drafts_ahead and options.drafts_ahead == "auto",
        )

    def serves(self, request: Request) -> bool:
        """Return whether the rows of a request may have drafts.

        They may not if the host chooses each token, or if a processor of the request cannot handle several positions in
        one step.
        """
        p = request.params
        free = p.allowed_tokens_fn is None and p.choose_fn is None and request.grammar is None
        return free and all(
            row is None or able for row, able in zip(request.rows, self.able, strict=True)
        )

    # ---- planning ----------------------------------------------------------------------------------------------------

    def most_drafts(self, rows: int, prompt: int = 0) -> int:
        """Return the number of drafts of each row in a step of ``rows`` decoding rows and ``prompt`` prompt tokens now.
        0 means that no row has drafts."""
        if self.failed:
            return 0
        if self.always:
            return self.k
        found = self._class(class_of(rows, prompt))
        return found.k if found.on else 0

    def _class(self, kind: StepClass) -> Class:
        if kind not in self.classes:
            self.classes[kind] = Class(self.k)
        return self.classes[kind]

    def drafts(
        self,
        s: Slots,
        cache: KVCache,
        decode: np.ndarray,
        most: int,
        budget: int,
        ahead: bool = False,
    ) -> np.ndarray:
        """Return the number of drafts i32 [n] of each decoding row, at most ``most``, within ``budget`` tokens in
        total.  The blocks for them are taken, but no row is preempted for them."""
        n = np.zeros(len(decode), np.int32)
        # A row that waits to fork also lacks one token, but it does not sample.
        known = s.known[decode]
        fits = s.speculates[decode] & (s.computed[decode] == known - 1)
        if not ahead:
            fits &= s.collected[decode] == known
        n[fits] = np.minimum(most, s.end[decode[fits]] - s.known[decode[fits]] - 1)
        if n.sum() > budget:
            n = np.minimum(n, budget // max(1, int(np.count_nonzero(n)))).astype(np.int32)
        missing = cache.missing(decode, s.computed[decode] + 1 + n)
        if missing.any() and not cache.can_take(missing):
            lack = missing.any(axis=0)
            n[lack] = 0
            missing[:, lack] = 0
        if missing.any():
            cache.grow(decode, missing)
        return n

    # ---- results -----------------------------------------------------------------------------------------------------

    def collect(
        self, plan: StepPlan, result: StepResult, heads: np.ndarray, got: np.ndarray
    ) -> None:
        """Count the drafts of a step.  ``heads`` are the plan rows that speculated, and ``got`` counts the tokens that
        each of them received.  A failed drafter switches speculation off."""
        failure = next((e for e in result.errors if e.scope == "drafts"), None)
        if failure is not None and not self.failed:
            self.failed = f"{failure.plugin}: {failure.message}"
            log.warning("speculation is off: the drafter failed: %s", self.failed)
        if len(result.drafted) != len(heads):
            return  # the step failed
        drafts = result.drafted
        taken = np.maximum(got - 1, 0)
        self.steps = self.steps + 1
        self.rows = self.rows + len(heads)
        self.tokens = self.tokens + int(got.sum())
        number = np.arange(len(self.proposed))
        self.proposed += (drafts[:, None] > number).sum(0)
        self.accepted += (np.minimum(taken, drafts)[:, None] > number).sum(0)

    def time(
        self, kind: StepClass, drafts: int, taken: np.ndarray, rows: int, now: float, fresh: bool
    ) -> None:
        """Record the time of a step of ``rows`` decoding rows whose result was processed at ``now``, in seconds.

        ``kind`` is its class, ``drafts`` the largest number of drafts of a row, and ``taken`` i32 [n] the accepted
        drafts of the rows that had drafts.  ``fresh`` means that all its rows are new, so that the engine may have been
        idle before."""
        before = self._ended
        self._ended = now
        if self.always or self.failed or not rows or fresh or before is None:
            return
        c = self._class(kind)
        if (drafts > 0) != c.on:
            return  # the step was planned before the last decision
        if c.first:
            c.first = False
        else:
            shares = (taken[:, None] > np.arange(self.k)).sum(0) / rows
            c.note(drafts, (now - before) * 1e3, shares, rows)
        if c.turn():
            log.info(
                "speculation is off for batches of about %d rows: the best number of drafts would not give more "
                "tokens per second; it is tried again after %d steps",
                rows,
                c.left,
            )

    def summary(self) -> dict[str, Any]:
        """Return the figures for ``stats``: proposed and accepted drafts by position, and the gain by batch size."""
        proposed = self.proposed.tolist()
        rate = [
            round(a / p, 4) if p else 0.0
            for a, p in zip(self.accepted.tolist(), proposed, strict=True)
        ]
        sizes = {
            str(c): {
                "gain": round(v.gain, 3),
                "k": v.k,
                "plain_ms": round(v.ms.get(0, 0.0), 3),
                "drafted_ms": round(v.ms.get(v.k, 0.0), 3),
                "tokens_per_row": round(v.tokens(v.k), 3),
                "on": self.failed == "" and v.on,
            }
            for c, v in sorted(self.classes.items())
        }
        return {
            "drafter": self.drafter,
            "k": self.k,
            "steps": self.steps,
            "proposed": int(self.proposed.sum()),
            "accepted": int(self.accepted.sum()),
            "acceptance_by_position": rate,
            "tokens_per_row": round(self.tokens / self.rows, 4) if self.rows else 0.0,
            "batch": sizes,
            "failed": self.failed or None,
        }
