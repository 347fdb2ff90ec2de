"""Limit the prompt tokens of a server's step so that the step ends in time.

While a step runs, commands wait and no other owner (API key or client address) is served.  A step of thousands of
tokens takes seconds on a CPU, and a token costs more the more tokens precede it.  So the loop measures the cost of a
prompt token, and of each key that the token attends to (``core/engine/pace.py``).

Steps are shorter while several owners are served, because every token of one owner waits for the prompt chunks of the
others.  Steps with scored prompts (prompt log-probabilities) have a ``TurnPace`` of their own.
"""

from __future__ import annotations

from minivllm.core.engine.pace import Pace

TURN = 0.5  # target in seconds for the prompts of a step
LONG = 0.9  # limit in seconds for the prompts of a step if chunks would otherwise have fewer than ``LEAST`` tokens
LEAST = 256  # least number of tokens of a chunk, because smaller chunks cost more than they gain
SHARED_TURN = 0.05  # seconds that prompts may add to a step while requests of several owners are served
# seconds for which steps stay short after several owners were served, because these are likely to return
SHARED_FOR = 10.0
SHARED_LEAST = {"cpu": 64}  # device -> least number of tokens of a chunk while several owners are served
# The same number on devices that ``SHARED_LEAST`` does not name, where a chunk of fewer tokens takes about as long.
SHARED_LEAST_ELSE = 512
FIRST = 32  # largest number of tokens of a step on a CPU before any step has been measured


class TurnPace(Pace):
    """The learned cost of prompt tokens, and the number of them in a turn of the server's loop."""

    def most(self, context: int, turn: float = TURN, least: int = LEAST) -> int:
        """Return the largest number of prompt tokens of the next step, after ``context`` computed tokens of the prompt.

        These tokens take about ``turn`` seconds.  If they are fewer than ``least``, a step may take longer (``LONG``,
        or ``TURN`` for a shared step) for up to ``least`` tokens.
        """
        return self.fit(context, turn, least, LONG if turn == TURN else TURN)
