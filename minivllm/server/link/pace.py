"""How many prompt tokens a step may have, so that it ends in time: nothing is obeyed and nobody else served before.

A step on a CPU takes seconds where it has thousands of tokens, and a token costs more the more tokens are before it.
So the loop learns what a prompt token costs, and what each key that it attends to adds::

    seconds of a step's prompts = tokens * (each + context * key)        context: keys that a token attends to, mean

Where several owners are served, each token of one waits for a chunk of another's prompt, scored or not: their steps
have a shorter turn.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

TURN = 0.5  # seconds that the prompts of a step should take at most
LONG = 0.9  # seconds that they may take where chunks would have fewer than ``LEAST`` tokens otherwise
LEAST = 256  # tokens: smaller chunks would cost more than they bring
FEWEST = 16  # tokens that a step may always have
SHARED_TURN = 0.05  # seconds that prompts may add to a step whose rows are of several owners
SHARED_FOR = 10.0  # seconds that they stay so short: an owner who was there is likely to come again
SHARED_LEAST = {"cpu": 64}  # tokens of it, by device
SHARED_LEAST_ELSE = 512  # an accelerator takes about as long for fewer
FIRST = 32  # tokens on a CPU, before anything has been measured
GROWTH = 4  # times the most tokens of a step so far: how a step may surpass all before it
KEPT = 0.6  # weight of what is known, once a step of full size has said more
CONTEXT = 1024  # keys that cost as much as the rest of a token, as far as nothing else is known
PRIOR = 0.05, 256.0  # how much that counts: as a step of such weight whose context is so many keys away


class Pace:
    """The cost of prompt tokens, from the steps so far, and the chunks that follow from it.

    ``budget``: tokens that a step may have at most; ``first``: tokens of the first one, before anything is known."""

    def __init__(self, budget: int, first: int) -> None:
        self.budget, self.reach = budget, min(first, budget)
        self.each, self.key = 0.0, 0.0  # seconds of a token, and of each key that it attends to; 0: not known
        self.mean = 0.0  # seconds of a token, of late
        self._bound = self.reach  # what a step of full size has
        # sums over the steps so far, each with its weight: 1, x, y, x x, x y (x: context, y: seconds a token)
        self._sums = np.zeros(5)

    def note(self, tokens: int, context: float, seconds: float) -> None:
        """Learn from a step whose prompts had so many tokens, of such a mean context, and took so long.  Steps of
        few tokens say little."""
        x, y = context, seconds / tokens
        weight = min(tokens / self._bound, 1.0)
        self._sums = self._sums * KEPT**weight + weight * np.array((1.0, x, y, x * x, x * y))
        n, sx, sy, sxx, sxy = self._sums.tolist()
        far = PRIOR[0] * n * PRIOR[1] ** 2  # the prior says: key = each / CONTEXT
        a, b, c = n + far / CONTEXT**2, sx - far / CONTEXT, sxx + far
        det = a * c - b * b
        each, key = (c * sy - b * sxy) / det, (a * sxy - b * sy) / det
        if key < 0.0:
            each, key = sy / n, 0.0
        elif each < 0.0:
            each, key = 0.0, sxy / sxx
        self.each, self.key, self.mean = max(each, 1e-12), key, sy / n
        self.reach = max(self.reach, min(GROWTH * tokens, self.budget))

    def most(self, context: int, turn: float = TURN, least: int = LEAST) -> int:
        """Return how many tokens of a prompt, of which ``context`` are computed, the next step may have: what takes
        ``turn`` seconds, or ``least`` tokens if these take no longer than is bearable."""
        if not self.each:
            self._bound = self.reach
            return self.reach
        found = self._tokens(context, turn)
        if found < least:
            bearable = self._tokens(context, LONG if turn == TURN else TURN)
            found = max(found, min(least, bearable), FEWEST)
        self._bound = min(int(found), self.reach)
        return self._bound

    def _tokens(self, context: int, seconds: float) -> float:
        """Return the n with n * (each + key * (context + n / 2)) = seconds, or the budget.  Far from the contexts of
        late the two are not known well, so a token is never taken to cost less than half of what it did."""
        linear = max(self.each + self.key * context, self.mean / 2)
        return min(2.0 * seconds / (linear + sqrt(linear * linear + 2.0 * self.key * seconds)), self.budget)
