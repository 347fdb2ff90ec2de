"""Limit the prompt tokens of a step, so that the decoding rows in the step do not wait too long for their next tokens.

    milliseconds of a step = decodes(rows) + prompts                 prompts: see ``pace``

Both times are learned from earlier steps.  A step without decoding rows has no limit.

With tpot_target_ms="auto" the prompts of a step may take AUTO times as long as the shortest step without prompts.  That
shortest time is mostly spent on reading the weights, which every step repeats, so it is a small share of such a longer
step.  A step of many decoding rows takes longer than the shortest one, but this does not raise the limit.

An image whose features take longer than the prompts of a step may take is encoded in several steps.  Each of these
steps spends half of that time on the image, and the other half on prompts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf
from typing import TYPE_CHECKING

import numpy as np

from .pace import Pace

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.plan import StepPlan

# with tpot_target_ms="auto", the largest ratio of the time of a step's prompts to the shortest step
# without prompts
AUTO = 8.0
LEAST_MS = 16.0  # with tpot_target_ms="auto", milliseconds that a step's prompts may always take
# Prompts always get this share of the target time, even if the decoding rows take all of it.
LEAST_SHARE = 0.25
CHUNK = 128  # a step may have this many prompt tokens if they take no longer than the target time
# count of groups of row counts whose times are learned separately: 1, 2 to 3, 4 to 7, ...
SIZES = 16
# At least this share of a step's time is counted for its prompts, because the time of its decoding
# rows is an estimate.
DOUBT = 0.05
ENCODED = 1024  # image tokens of a measurement of an encoder that has full weight
MOST_STEPS = 64  # largest number of steps that compute the features of an image
KEPT = 0.8  # weight of the earlier measurements of a group relative to a new one


class StepBudget:
    """Learns the times of steps, and limits the prompt tokens of the next step.

    ``target_ms`` is the time that a step with decoding rows may take; None derives it from steps without prompts.
    ``most`` is the largest number of tokens of a step.  ``sizes`` are the numbers of tokens of long steps without
    padding, ascending."""

    def __init__(self, target_ms: float | None, most: int, sizes: Sequence[int] = ()) -> None:
        self.target_ms, self.sizes = target_ms, tuple(sizes)
        self.pace = Pace(most, most)
        # learned time to encode image tokens, each of which attends to all tokens of its image
        self.encodes = Pace(most, min(ENCODED, most))
        # milliseconds of a step without prompts, for each group of row counts; 0 means unknown
        self._decodes = np.zeros(SIZES)

    @classmethod
    def of(cls, wiring: Wiring, sizes: Sequence[int] = ()) -> StepBudget | None:
        """Return the time budget for the steps of an engine, None if the configuration sets no target time."""
        target = wiring.steps.tpot_target_ms
        if target == "off":
            return None
        return cls(
            None if target == "auto" else float(target), wiring.max_num_batched_tokens, sizes
        )

    def note(
        self, plan: StepPlan, device_ms: float, encoded: tuple[float, float] | None = None
    ) -> None:
        """Update the times with a finished step that took ``device_ms`` on the device.

        0, NaN and infinity mean that an executor did not measure it.  ``encoded`` has the image tokens that the step
        encoded, and the mean number of tokens of their images; None if the step encoded none.  A step that frees
        features is left out."""
        q_len = plan.q_len
        if not 0 < device_ms < inf or not len(q_len):
            return
        if encoded is not None:
            self._note_encodes(plan, device_ms, *encoded)
            return
        if len(plan.delta.image):
            return
        if q_len[-1] == 1:
            group = _group(len(q_len))
            last = self._decodes[group]
            self._decodes[group] = device_ms if not last else KEPT * last + (1 - KEPT) * device_ms
            return
        chunk = q_len > 1
        tokens = q_len[chunk].astype(np.int64)
        total = int(tokens.sum())
        rows = len(q_len) - len(tokens)
        context = float(tokens @ (plan.computed[chunk] + tokens / 2)) / total
        prompts = max(device_ms - self.decodes_ms(rows), DOUBT * device_ms)
        self.pace.note(total, context, prompts / 1e3)

    def _note_encodes(
        self, plan: StepPlan, device_ms: float, tokens: float, context: float
    ) -> None:
        """Update the time of features with a step that encoded ``tokens`` image tokens.

        The time of the step's own tokens is estimated.  Without an estimate of its prompts the step is left out."""
        chunk = plan.q_len > 1
        lengths = plan.q_len[chunk].astype(np.int64)
        if len(lengths) and not self.pace.each:
            return
        others = self.decodes_ms(len(plan.q_len) - len(lengths))
        if len(lengths):
            total = int(lengths.sum())
            keys = float(lengths @ (plan.computed[chunk] + lengths / 2)) / total
            others += 1e3 * self.pace.seconds(total, keys)
        ms = max(device_ms - others, DOUBT * device_ms)
        self.encodes.note(max(round(tokens), 1), context, ms / 1e3)

    def steps_of(self, rows: int, tokens: int) -> int:
        """Return the number of steps with ``rows`` decoding rows that compute the features of an image with ``tokens``
        tokens: 1 if they take no longer than the prompts of a step may take, or if their time is unknown."""
        ms = 1e3 * self.encodes.seconds(tokens, tokens)
        limit = self._prompts_ms(rows)
        if ms <= limit:
            return 1
        return min(ceil(2 * ms / limit), MOST_STEPS)

    def decodes_ms(self, rows: int) -> float:
        """Return the milliseconds of a step with ``rows`` decoding rows and no prompts, as measured for about as many
        rows."""
        if not rows:
            return 0.0
        known = self._decodes.nonzero()[0]
        if not len(known):
            return 0.0
        return float(self._decodes[known[np.abs(known - _group(rows)).argmin()]])

    def most(self, rows: int, context: int, length: float = inf) -> int:
        """Return the prompt tokens that the next step may have beside ``rows`` decoding rows.

        ``context`` is the number of computed tokens of the prompts, ``length`` the tokens of the longest prompt."""
        prompts = self._prompts_ms(rows)
        bearable = 2 * prompts if self.target_ms is None else self.target_ms
        found = self.pace.fit(context, prompts / 1e3, CHUNK, bearable / 1e3, length)
        return self._without_padding(found, rows)

    def _prompts_ms(self, rows: int) -> float:
        """Return the milliseconds that the prompts of a step may take beside ``rows`` decoding rows."""
        if self.target_ms is not None:
            return max(self.target_ms - self.decodes_ms(rows), LEAST_SHARE * self.target_ms)
        known = self._decodes[self._decodes > 0]
        return max(AUTO * float(known.min()), LEAST_MS) if len(known) else LEAST_MS

    def _without_padding(self, tokens: int, rows: int) -> int:
        """Return the largest number of prompt tokens, at most ``tokens``, that needs no padding in a step with ``rows``
        decoding rows.

        ``tokens`` is returned if the step is shorter than each captured step, or if less than half of the tokens would
        remain.
        """
        fitting = bisect_right(self.sizes, tokens + rows)
        if not fitting or not self.pace.each:
            return tokens
        unpadded = self.sizes[fitting - 1] - rows
        return unpadded if 2 * unpadded >= tokens else tokens


def _group(rows: int) -> int:
    return min(rows.bit_length() - 1, SIZES - 1)
