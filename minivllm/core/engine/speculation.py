"""Speculation on the host: how many drafts a step plans, what became of them, and whether it pays.

Drafts are accepted with some probability and cost time; beyond some batch size a step with drafts takes longer than
the tokens that it wins are worth.  Nobody knows where, so it is measured: for each class of batch sizes (powers of
two) the time of a step with and without drafts, and the tokens that a row gets from one with drafts.  Speculation is on
while

    tokens per row and step with drafts * milliseconds without  >=  milliseconds with

Where it is off it is tried again for a few steps, at first soon and then more and more rarely; what a trial costs says
how long the next one waits.
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
# steps of one kind in a row, of which the first is not counted: the one before was of the other kind
TRIES = 8
FIRST_WAIT, MOST_WAIT = 32, 512  # steps without drafts until it is tried again
RENEW = 512  # steps with drafts after which steps without are timed again
WEIGHT = 0.1  # of a new step in the running means
HOPELESS, ENOUGH = 0.7, 3  # gain below which a trial ends, after so many of its steps
# times as long as a trial took it is not tried again, so that trials cost a twentieth of the time
TRIAL_COST = 20


@dataclass
class Class:
    """What is known of batches of a size."""

    plain_ms: float = 0.0  # 0: not measured yet
    drafted_ms: float = 0.0
    per_row: float = 0.0  # tokens of a row in a step with drafts
    on: bool = False
    left: int = TRIES  # steps until it is decided anew
    trial: bool = True  # they are few, to find out
    wait: int = FIRST_WAIT

    @property
    def gain(self) -> float:
        """Tokens per second with drafts, over those without; 0 before both were measured."""
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
        """One step less until it is decided anew; True if that changed ``on`` for good."""
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
        # One kind is not measured yet; or what drafts are compared with is timed again; or they are tried, or pay.
        self.on = (was and trial and pays) or not was
        self.trial = not self.gain or not pays or (was and not trial)
        self.left = TRIES if self.trial else RENEW
        self.wait = FIRST_WAIT if pays else self.wait
        return False


@dataclass
class Speculation:
    """``k``: drafts a row at most.  ``always``: whether it pays is not asked.  Invariant: ``accepted[j] <=
    proposed[j]``, both falling in j."""

    k: int
    drafter: str
    always: bool = False
    # per processor, the sampler last: it serves several positions of a row in one step
    able: tuple[bool, ...] = ()
    failed: str = ""  # why the drafter is asked no more
    steps: int = 0
    rows: int = 0  # that speculated, over all steps
    tokens: int = 0  # that these rows got
    classes: dict[int, Class] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proposed, self.accepted = np.zeros(self.k, np.int64), np.zeros(self.k, np.int64)
        self._last: tuple[int, bool] | None = None
        self._begun = 0.0

    @classmethod
    def of(cls, wiring: Wiring) -> Speculation | None:
        """None unless the wiring has a drafter that drafts."""
        asked = wiring.speculation
        if not asked.num_speculative_tokens:
            return None
        able = tuple(
            "multi_position" in p.features for p in (*wiring.processors, wiring.parts["sampler"])
        )
        always = asked.speculate == "always"
        return cls(asked.num_speculative_tokens, wiring.parts["drafter"].name, always, able)

    def serves(self, request: Request) -> bool:
        """Whether its rows may bring drafts: not if the host has a word on each token, or a processor that they have
        bound needs them one by one."""
        p = request.params
        free = p.allowed_tokens_fn is None and p.choose_fn is None and request.grammar is None
        return free and all(
            row is None or able for row, able in zip(request.rows, self.able, strict=True)
        )

    # ---- planning ----------------------------------------------------------------------------------------------------

    def on(self, rows: int) -> bool:
        """Whether a batch of so many decoding rows speculates now."""
        return not self.failed and (self.always or self._class(rows).on)

    def _class(self, rows: int) -> Class:
        return self.classes.setdefault(max(rows - 1, 0).bit_length(), Class())

    def drafts(self, s: Slots, cache: KVCache, decode: np.ndarray, budget: int) -> np.ndarray:
        """Drafts for each of the rows that decode, i32; takes the blocks that they need, but preempts nobody."""
        n = np.zeros(len(decode), np.int32)
        if not len(decode) or budget <= 0 or not self.on(len(decode)):
            return n
        known = s.known[decode]  # a row that waits to fork lacks one token too, and draws none
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

    # ---- what became of them -----------------------------------------------------------------------------------------

    def collect(
        self, plan: StepPlan, result: StepResult, heads: np.ndarray, got: np.ndarray
    ) -> None:
        """``heads``: rows of the plan that speculated, ``got``: tokens that each of them was given."""
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
        """A step of ``rows`` decoding rows, planned at ``begun`` seconds, was published at ``now`` and gave them
        ``got`` tokens; ``pure``: nothing else was in it."""
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
        """For ``stats``: what was proposed and accepted, by position, and where it pays."""
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
