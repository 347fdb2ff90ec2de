"""How many prompt tokens a step may have, so that it ends in time: before that nothing is obeyed, nobody else served.

A step on a CPU takes seconds where it has thousands of tokens.  Somebody who leaves in the middle of it still pays for
all of it, and so does everybody who comes meanwhile.
"""

from __future__ import annotations

TURN = 0.5  # seconds that a step should take at most
LEAST = 256  # tokens: smaller chunks would cost more than they bring
FIRST = 512  # on a CPU, before anything has been measured


class Pace:
    """``tokens`` is the bound, from the steps so far; it never exceeds ``most``, the budget of a step."""

    def __init__(self, most: int, first: int) -> None:
        self.most, self.tokens = most, min(most, first)

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long.  One that was too slow sets the bound by its own speed; one that used
        at least half of the bound may raise it, to twice as much."""
        fits = tokens * TURN / max(seconds, 1e-6)
        if seconds > TURN and tokens >= LEAST:
            self.tokens = min(self.most, max(LEAST, int(fits)))
        elif 2 * tokens >= self.tokens:
            self.tokens = min(self.most, max(self.tokens, min(int(fits), 2 * self.tokens)))
