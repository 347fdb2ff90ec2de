"""Speculation on the host: the number of drafts in a step, the accepted drafts, and whether speculation pays.

Drafts are accepted with some probability and cost time; beyond some batch size a step with drafts takes longer than
the accepted tokens save.  That size is measured: for each class of batch sizes (powers of two) the time of a step with
and without drafts, and the tokens per row in a step with drafts.  Speculation is on while

    tokens per row and step with drafts * milliseconds without  >=  milliseconds with

Where it is off it is tried again for a few steps, at first soon and then more and more rarely.  The cost of a trial
determines the wait before the next one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.plan import StepPlan, StepResult

    from .cache import KVCache
    from .request import Request
    from .slots import Slots

log = logging.getLogger("minivllm")
# steps of a trial; the first is not timed, because the step before was of the other kind
TRIES = 8
FIRST_WAIT, MOST_WAIT = 32, 512  # steps without drafts until it is tried again
RENEW = 512  # steps with drafts after which steps without are timed again
WEIGHT = 0.1  # weight of a new step in the running means
HOPELESS, ENOUGH = 0.7, 3  # a trial ends early below this gain, after this many steps
# wait this many times a trial's duration before the next, so that trials take a twentieth of the time
TRIAL_COST = 20


@dataclass
class Class:
    """Measurements of one class of batch sizes."""

    plain_ms: float = 0.0  # 0: not measured yet
    drafted_ms: float = 0.0
    per_row: float = 0.0  # tokens of a row in a step with drafts
    on: bool = False
    left: int = TRIES  # steps until the next decision
    trial: bool = True  # the current steps are a trial
    wait: int = FIRST_WAIT

    @property
    def gain(self) -> float:
        """Return the tokens per second with drafts divided by those without; 0 before both were measured."""
        return (
            self.per_row * self.plain_ms / self.drafted_ms
            if self.plain_ms and self.drafted_ms
            else 0.0
        )

    def note(self, drafts: bool, ms: float, per_row: float) -> None:
        mix = lambda old, new: new if not old else old + WEIGHT * (new - old)  # noqa: E731
        if drafts:
            self.drafted_ms, self.per_row = mix(self.drafted_ms, ms), mix(self.per_row, per_row)
        else:
            self.plain_ms = mix(self.plain_ms, ms)

    def turn(self) -> bool:
        """Count down one step, and decide anew at 0 whether the class speculates.  Return True if speculation was
        switched off because it does not pay."""
        self.left -= 1
        hopeless = (
            self.on and self.trial and 0 < self.gain < HOPELESS and self.left <= TRIES - ENOUGH
        )
        if self.left > 0 and not hopeless:
            return False
        pays, was, trial = self.gain >= 1, self.on, self.trial
        if self.gain and was and not pays:
            spent = (TRIES - self.left) * self.drafted_ms if trial else 0.0
            self.left = max(self.wait, int(TRIAL_COST * spent / self.plain_ms))
            self.wait = min(2 * self.wait, MOST_WAIT)
            self.on = self.trial = False
            return True
        # Switch on if steps without drafts were just timed. Stay on only after a successful trial.
        self.on = (was and trial and pays) or not was
        self.trial = not self.gain or not pays or (was and not trial)
        self.left = TRIES if self.trial else RENEW
        self.wait = FIRST_WAIT if pays else self.wait
        return False


@dataclass
class Speculation:
    """Counters and decisions of speculation.  ``k`` is the most drafts per row.  ``always`` speculates without
    measuring the gain.  Invariant: ``accepted[j] <= proposed[j]``, both falling in j."""

    k: int
    drafter: str
    always: bool = False
    # per processor, the sampler last: True if it handles several positions of a row in one step
    able: tuple[bool, ...] = ()
    failed: str = ""  # error of a failed drafter, which is not called any more
    steps: int = 0
    rows: int = 0  # rows with drafts, summed over all steps
    tokens: int = 0  # tokens that these rows received
    classes: dict[int, Class] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proposed, self.accepted = np.zeros(self.k, np.int64), np.zeros(self.k, np.int64)
        self._last: tuple[int, bool] | None = None
        self._begun = 0.0

    @classmethod
    def of(cls, wiring: Wiring) -> Speculation | None:
        """Return the speculation of an engine; None if its wiring has no drafter that drafts."""
        asked = wiring.speculation
        if not asked.num_speculative_tokens:
            return None
        able = tuple(
            "multi_position" in p.features for p in (*wiring.processors, wiring.parts["sampler"])
        )
        always = asked.speculate == "always"
        return cls(asked.num_speculative_tokens, wiring.parts["drafter"].name, always, able)

    def serves(self, request: Request) -> bool:
        """Return True if the rows of a request may have drafts.  They may not if the host decides on each token, or if
        a bound processor cannot handle several positions in one step."""
        p = request.params
        free = p.allowed_tokens_fn is None and p.choose_fn is None and request.grammar is None
        return free and all(
            row is None or able for row, able in zip(request.rows, self.able, strict=True)
        )

    # ---- planning ----------------------------------------------------------------------------------------------------

    def on(self, rows: int) -> bool:
        """Return True if a batch of ``rows`` decoding rows speculates now."""
        return not self.failed and (self.always or self._class(rows).on)

    def _class(self, rows: int) -> Class:
        return self.classes.setdefault(max(rows - 1, 0).bit_length(), Class())

    def drafts(self, s: Slots, cache: KVCache, decode: np.ndarray, budget: int) -> np.ndarray:
        """Return the number of drafts i32 [n] of each decoding row, within ``budget`` tokens in total.  The blocks for
        them are taken, but no row is preempted for them."""
        n = np.zeros(len(decode), np.int32)
        if not len(decode) or budget <= 0 or not self.on(len(decode)):
            return n
        # A row that waits to fork also lacks one token, but it does not sample.
        known = s.known[decode]
        fits = (
            s.speculates[decode]
            & (s.collected[decode] == known)
            & (s.computed[decode] == known - 1)
        )
        n[fits] = np.minimum(self.k, s.end[decode[fits]] - s.known[decode[fits]] - 1)
        if n.sum() > budget:
            n = np.minimum(n, budget // max(1, int(np.count_nonzero(n)))).astype(np.int32)
        missing = cache.missing(decode, s.computed[decode] + 1 + n)
        if missing.any() and not cache.can_take(missing):
            lack = missing.any(axis=0)
            n[lack], missing[:, lack] = 0, 0
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
        drafts, taken = result.drafted, np.maximum(got - 1, 0)
        self.steps = self.steps + 1
        self.rows = self.rows + len(heads)
        self.tokens = self.tokens + int(got.sum())
        for j in range(self.k):
            self.proposed[j] += np.count_nonzero(drafts > j)
            self.accepted[j] += np.count_nonzero((taken > j) & (drafts > j))

    def time(self, rows: int, drafts: bool, got: int, begun: float, now: float, pure: bool) -> None:
        """Record the time of a step of ``rows`` decoding rows, which was planned at ``begun`` and published at ``now``,
        in seconds.  ``got`` is the tokens of all rows.  ``pure`` means that the step had no other rows."""
        ms, self._begun = (now - max(begun, self._begun)) * 1e3, now
        if self.always or self.failed or not rows:
            return
        here = (max(rows - 1, 0).bit_length(), drafts)
        same, self._last = here == self._last, here
        c = self._class(rows)
        if pure and same:
            c.note(drafts, ms, got / rows)
        if drafts == c.on and c.turn():
            log.info(
                "speculation is off for batches of about %d rows: it would give %.2f times the tokens per second; it "
                "is tried again after %d steps",
                rows,
                c.gain,
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
            f"{(1 << c >> 1) + 1}-{1 << c}" if c > 1 else str(1 << c): {
                "gain": round(v.gain, 3),
                "plain_ms": round(v.plain_ms, 3),
                "drafted_ms": round(v.drafted_ms, 3),
                "tokens_per_row": round(v.per_row, 3),
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
