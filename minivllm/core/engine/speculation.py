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
# number of steps of a trial; the first one is not timed, because the step before it was planned
# otherwise
TRIES = 8
# a trial has more steps until it has observed the accepted drafts of this many rows
TRIED_ROWS = 32
# count of steps without drafts between two trials of speculation: after the first trial, and at most
FIRST_WAIT, MOST_WAIT = 32, 512
RENEW = 512  # after this many steps with drafts, steps without drafts are timed again
LAST_STEPS = 15  # the time of steps is the median of the newest ones, of this number
WEIGHT = 0.1  # weight of a new step in the running mean of accepted drafts, at most
# the running mean of accepted drafts covers at least this many rows of the newest steps
MEAN_ROWS = 64
HOPELESS, ENOUGH = 0.7, 3  # a trial ends early if its gain is below 0.7 after 3 steps
# ratio of the wait before the next trial of speculation to a trial that did not pay, so that trials
# take a twentieth of the time
TRIAL_COST = 20
KEEP = 1.02  # the number of drafts changes only if the gain becomes larger by this factor


class StepClass(NamedTuple):
    """The class of a step: its decoding rows and its prompt tokens, rounded to powers of two (see ``class_of``)."""

    rows: int
    prompt: int

    def __str__(self) -> str:
        rows = _span(self.rows)
        return rows if not self.prompt else f"{rows} beside {_span(self.prompt - 1)} prompt tokens"


def class_of(rows: int, prompt: int) -> StepClass:
    """Return the class of a step with ``rows`` decoding rows and ``prompt`` prompt tokens: both rounded to powers of
    two.  Drafts do not count as rows."""
    return StepClass(max(rows - 1, 0).bit_length(), 1 + (prompt - 1).bit_length() if prompt else 0)


def _span(size: int) -> str:
    """Return the range of numbers that are rounded up to 2 ** ``size``, as text such as "5-8"."""
    return f"{(1 << size >> 1) + 1}-{1 << size}" if size > 1 else str(1 << size)


@dataclass
class Class:
    """Measured times of the steps of one ``StepClass``, and what follows from them: whether its steps have drafts
    (``on``), and how many per row (``k``).  ``most`` is the largest number of drafts of a row, and ``tries`` the number
    of steps of a trial with drafts."""

    most: int
    tries: int = TRIES
    # drafts per row -> milliseconds of a step, the median of the newest ones
    ms: dict[int, float] = field(default_factory=dict)
    k: int = 0  # drafts per row, in steps that have drafts
    on: bool = False
    left: int = TRIES  # count of steps until the next decision
    trial: bool = True  # whether the present steps are a trial of speculation
    wait: int = FIRST_WAIT
    tried: int = 0  # count of timed steps with drafts in the present trial
    # whether the next step is the first one after a decision, which is not timed
    first: bool = True
    # drafts per row -> milliseconds of the newest steps
    recent: dict[int, deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.k = self.k or self.most
        # for each draft number: share of the rows whose draft with this number, and all drafts
        # before it, were accepted
        self.shares = np.zeros(self.most)
        # for each draft number: count of steps in which the share of accepted drafts was measured
        self.observed = np.zeros(self.most, np.int64)

    def tokens(self, k: int) -> float:
        """Return the expected number of tokens that a row gets in a step with ``k`` drafts."""
        return 1.0 + float(self.shares[:k].sum())

    def estimate(self, k: int) -> float:
        """Return the milliseconds of a step with ``k`` drafts per row, interpolated if no step with ``k`` was timed."""
        known = sorted(self.ms)
        times = [self.ms[n] for n in known]
        return float(np.interp(k, known, times))

    def gain_of(self, k: int) -> float:
        """Return the tokens per second with ``k`` drafts per row, divided by the tokens per second without drafts.

        It is 0 until steps with and without drafts have been timed."""
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
        """Add a step of ``rows`` rows with ``drafts`` drafts per row to the measurements.

        ``ms`` is its time in milliseconds.  ``shares`` f64 [most] has, for each draft number, the share of the rows
        that accepted this draft."""
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
        """Remove the measured times of steps with ``drafts`` drafts per row, because they are old."""
        self.ms.pop(drafts, None)
        self.recent.pop(drafts, None)

    def turn(self) -> bool:
        """Count a step.  If enough steps have run since the last decision, decide again whether steps have drafts, and
        how many.

        Return True if speculation was switched off, because it does not save time."""
        self.left -= 1
        gain = 0.0
        if self.on:
            gain = max(self.gain_of(k) for k in range(1, self.most + 1))
        early = self.trial and self.left <= self.tries - ENOUGH
        hopeless = early and 0 < gain < HOPELESS
        if self.left > 0 and not hopeless:
            return False
        before = self.on, self.k
        stopped = self._decide(gain)
        self.first = before != (self.on, self.k)
        return stopped

    def _decide(self, gain: float) -> bool:
        """Choose whether the next steps have drafts, no drafts, or a trial of another number of drafts.  ``gain`` is
        the largest measured gain, 0 if none was measured.  Return whether speculation was switched off."""
        if not self.on:  # the last steps had no drafts, and were timed
            self.on = self.trial = True
            self.left = self.tries
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
        self.left = self.tries
        # time some steps without drafts again, and then steps with one draft more
        if not self.trial:
            self.left = TRIES
            self.on = False
            self.trial = True
            self.forget(0)
            self.k = min(self.k + 1, self.most)
        return False

    def _stop(self) -> None:
        """Switch speculation off, and set the wait before the next trial and the number of drafts of that trial."""
        spent = self.tried * self.estimate(self.k)
        self.left = max(self.wait, int(TRIAL_COST * spent / self.ms[0]))
        self.wait = min(2 * self.wait, MOST_WAIT)
        self.on = self.trial = False
        self.k = self.best()

    def _changed(self) -> bool:
        """Set the number of drafts to the best one, and return whether steps with this number have not been
        timed yet."""
        before = self.k
        self.k = self.best()
        return self.k != before and self.k not in self.ms


@dataclass
class Speculation:
    """Counts the drafts (tokens that a drafter proposes and the model verifies) and decides how many a step has.

    ``k`` is the largest number of drafts of a row.  ``always`` uses drafts without measuring whether they save time.
    Invariant: ``accepted[j] <= proposed[j]``, and both fall with the draft number j."""

    k: int
    drafter: str
    always: bool = False
    # for each logits processor, then the sampler: whether it handles several positions of a row in
    # one step
    able: tuple[bool, ...] = ()
    failed: str = ""  # error message of a drafter that failed and is not called any more
    steps: int = 0
    rows: int = 0  # count of rows with drafts in all steps
    tokens: int = 0  # count of tokens that the rows with drafts received in all steps
    ahead: bool = False  # whether a row may have drafts while another step with it is in flight
    classes: dict[StepClass, Class] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # counts of rows by their number of proposed and of accepted drafts, from 0 to k
        self.rows_proposed, self.rows_accepted = np.zeros((2, 1 + self.k), np.int64)
        self._ended: float | None = None  # time at which the last result was processed, in seconds

    @classmethod
    def of(cls, wiring: Wiring, capacity: Capacity) -> Speculation | None:
        """Return the speculation of an engine; None if its configuration has no drafter."""
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

    @property
    def proposed(self) -> np.ndarray:
        """Return the count i64 [k] of first, second ... drafts that were proposed."""
        return _at_least(self.rows_proposed)

    @property
    def accepted(self) -> np.ndarray:
        """Return the count i64 [k] of first, second ... drafts that were accepted."""
        return _at_least(self.rows_accepted)

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
        """Return how many drafts each row has in a step of ``rows`` decoding rows and ``prompt`` prompt tokens, by the
        times measured so far; 0 means no drafts."""
        if self.failed:
            return 0
        if self.always:
            return self.k
        found = self._class(class_of(rows, prompt))
        return found.k if found.on else 0

    def _class(self, kind: StepClass) -> Class:
        if kind not in self.classes:
            self.classes[kind] = Class(self.k, max(TRIES, TRIED_ROWS >> kind.rows))
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
        # A row whose branches are about to fork lacks one computed token too, but samples no token
        # in this step, so it has no drafts.
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
        """Count the proposed and accepted drafts of a step.  ``heads`` are the plan rows that had drafts, and ``got``
        i32 has the number of tokens that each of them received.  If the drafter has failed, speculation ends."""
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
        self.rows_proposed += np.bincount(drafts, minlength=1 + self.k)
        self.rows_accepted += np.bincount(np.minimum(taken, drafts), minlength=1 + self.k)

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
            return  # the step was planned before the last decision about the number of drafts
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
        """Return statistics: for each draft number the proposed and accepted drafts, and for each class of steps the
        gain and the times."""
        proposed = self.proposed
        accepted = self.accepted
        rate = [
            round(a / p, 4) if p else 0.0
            for a, p in zip(accepted.tolist(), proposed.tolist(), strict=True)
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
            "proposed": int(proposed.sum()),
            "accepted": int(accepted.sum()),
            "acceptance_by_position": rate,
            "tokens_per_row": round(self.tokens / self.rows, 4) if self.rows else 0.0,
            "batch": sizes,
            "failed": self.failed or None,
        }


def _at_least(counts: np.ndarray) -> np.ndarray:
    """Return the numbers of rows with at least 1 to k drafts, from the ``counts`` of rows with 0 to k drafts."""
    return counts[::-1].cumsum()[-2::-1]
