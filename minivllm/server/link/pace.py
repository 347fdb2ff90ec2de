"""How many prompt tokens a step may have, so that it ends in time: before that nothing is obeyed, nobody else served.

A step on a CPU takes seconds where it has thousands of tokens.  Somebody who leaves in the middle of it still pays for
all of it, and so does everybody who comes meanwhile.  Where several owners are served, each token of one waits for a
chunk of another's prompt, scored or not: their steps have a shorter turn.
"""

from __future__ import annotations

TURN = 0.5  # seconds that a step should take at most
LEAST = 256  # tokens: smaller chunks would cost more than they bring
SHARED_TURN = 0.05  # seconds that prompts may add to a step whose rows are of several owners
SHARED_LEAST = {"cpu": 64}  # tokens of it, by device
SHARED_LEAST_ELSE = 512  # an accelerator takes about as long for fewer
FIRST = 512  # on a CPU, before anything has been measured


class Pace:
    """``tokens`` is the bound, from the steps so far; it never exceeds ``most``, the budget of a step.  ``turn``:
    seconds that a step should take at most; ``least``: tokens that it may have however long they take."""

    def __init__(self, most: int, first: int, turn: float = TURN, least: int = LEAST) -> None:
        self.most, self.turn, self.least = most, turn, least
        self.tokens = min(most, first)

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long.  One that was too slow sets the bound by its own speed; one that used
        at least half of the bound may raise it, to twice as much."""
        fits = tokens * self.turn / max(seconds, 1e-6)
        if seconds > self.turn and tokens >= self.least:
            self.tokens = min(self.most, max(self.least, int(fits)))
        elif 2 * tokens >= self.tokens:
            self.tokens = min(self.most, max(self.tokens, min(int(fits), 2 * self.tokens)))
