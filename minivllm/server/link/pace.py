"""Limit the prompt tokens of a server's step so that the step ends in time.

While a step runs, commands wait and no other owner is served.  A step of thousands of tokens takes seconds on a CPU,
and a token costs more the more tokens precede it.  So the loop learns the cost of a prompt token, and of each key that
the token attends to (``core/engine/pace.py``).

Steps are shorter while several owners are served, because every token of one owner waits for the prompt chunks of the
others.  Steps with scored prompts (prompt log-probabilities) have a ``TurnPace`` of their own.
"""

from __future__ import annotations

from minivllm.core.engine.pace import Pace

TURN = 0.5  # seconds that the prompts of a step should take at most
LONG = 0.9  # seconds that they may take if chunks would otherwise have fewer than ``LEAST`` tokens
LEAST = 256  # tokens of a chunk, since smaller chunks cost more than they gain
SHARED_TURN = 0.05  # seconds that prompts may add to a step while several owners are served
SHARED_FOR = 10.0  # seconds that steps stay short after several owners were served, since they are likely to return
SHARED_LEAST = {"cpu": 64}  # device -> tokens of a chunk while several owners are served
SHARED_LEAST_ELSE = 512  # the same for accelerators, which take about as long for fewer tokens
FIRST = 32  # tokens of a step on a CPU before any step has been measured


class TurnPace(Pace):
    """The learned cost of prompt tokens, and the number of them in a turn of the server's loop."""

    def most(self, context: int, turn: float = TURN, least: int = LEAST) -> int:
        """Return the prompt tokens that the next step may have, after ``context`` computed tokens of the prompt.

        They take about ``turn`` seconds.  If these are fewer than ``least`` tokens, a step may take longer (``LONG``,
        or ``TURN`` for a shared step) to have up to ``least``.
        """
        return self.fit(context, turn, least, LONG if turn == TURN else TURN)
