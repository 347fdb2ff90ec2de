"""Learned cost of prompt tokens, and the number of them that take a given time.

seconds of a step's prompts = tokens * (each + context * key)        context: mean number of keys of a token
"""

from __future__ import annotations

from math import inf, sqrt

import numpy as np

FEWEST = 16  # number of prompt tokens that a step may always have
GROWTH = 4  # largest factor between the tokens of a step and those of the largest step so far
KEPT = 0.6  # weight of all earlier measurements relative to that of a new step of full size
# assumed before any measurement: attention to this many keys takes as long as all other work for a
# token
CONTEXT = 1024
PRIOR = (
    0.05,
    256.0,
    # weight of the assumption that a key costs 1 / CONTEXT of a token: as a share of the weight of the
    # measurements, and as a distance in keys from the mean context
)


class Pace:
    """Learns the time of prompt tokens from the steps so far, and computes how many of them the next step may have.

    A step may have ``budget`` tokens at most, and ``first`` tokens before any step has been measured."""

    def __init__(self, budget: int, first: int) -> None:
        self.budget = budget
        # the next step may have at most this many tokens, because much larger steps were not measured
        # (``GROWTH``)
        self.reach = min(first, budget)
        # seconds per token, and per key that a token attends to; 0 means unknown
        self.each = 0.0
        self.key = 0.0
        self.mean = 0.0  # mean seconds per token of the recent steps
        # number of tokens of a full step; a step with fewer tokens counts less in the measurements
        self._bound = self.reach
        # sums over the steps so far, newer ones with more weight, of 1, x, y, x x and x y; x is the
        # context and y the seconds per token
        self._sums = np.zeros(5)

    def note(self, tokens: int, context: float, seconds: float) -> None:
        """Update the learned times with a step that had ``tokens`` prompt tokens and took ``seconds`` for them.
        ``context`` is the mean number of keys to which these tokens attend.

        Steps of few tokens have a low weight."""
        x = context
        y = seconds / tokens
        weight = min(tokens / self._bound, 1.0)
        self._sums = self._sums * KEPT**weight + weight * np.array((1.0, x, y, x * x, x * y))
        n, sx, sy, sxx, sxy = self._sums.tolist()
        # The prior assumption is that a key costs as much as 1 / CONTEXT of a token: key = each / CONTEXT.
        far = PRIOR[0] * n * PRIOR[1] ** 2
        a = n + far / CONTEXT**2
        b = sx - far / CONTEXT
        c = sxx + far
        det = a * c - b * b
        each = (c * sy - b * sxy) / det
        key = (a * sxy - b * sy) / det
        if key < 0.0:
            each = sy / n
            key = 0.0
        elif each < 0.0:
            each = 0.0
            key = sxy / sxx
        self.each = max(each, 1e-12)
        self.key = key
        self.mean = sy / n
        self.reach = max(self.reach, min(GROWTH * tokens, self.budget))

    def seconds(self, tokens: float, context: float) -> float:
        """Return the learned time of ``tokens`` tokens that attend to ``context`` keys on average, 0 if unknown."""
        return tokens * max(self.each + self.key * context, self.mean / 2)

    def fit(
        self, context: int, seconds: float, least: int, bearable: float, length: float = inf
    ) -> int:
        """Return the largest number of prompt tokens of the next step, after ``context`` computed tokens of the prompt.

        These tokens take about ``seconds``.  If fewer than ``least`` tokens fit, a step may take up to ``bearable``
        seconds for ``least`` tokens.  No prompt has more than ``length`` tokens, so a longer step computes several
        prompts.
        """
        if not self.each:
            self._bound = self.reach
            return self.reach
        found = self._tokens(context, seconds, length)
        if found < least:
            longer = self._tokens(context, bearable, length)
            found = max(found, min(least, longer), FEWEST)
        self._bound = min(int(found), self.reach)
        return self._bound

    def _tokens(self, context: int, seconds: float, length: float) -> float:
        """Return the number n of tokens with n * (each + key * (context + n / 2)) = seconds, at most the budget.

        Beyond ``length`` tokens the mean context no longer grows with n.  The learned costs are uncertain for contexts
        far from the recent ones.  So a token is assumed to cost at least half of the recent mean."""
        linear = max(self.each + self.key * context, self.mean / 2)
        found = 2.0 * seconds / (linear + sqrt(linear * linear + 2.0 * self.key * seconds))
        if found > length:
            found = seconds / (linear + self.key * length / 2.0)
        return min(found, self.budget)
