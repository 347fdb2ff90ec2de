"""Spread many requests that arrive or fail at the same time over several rounds of the event loop.

Each round starts a few of them, so that no round takes long.  Requests to /health do not wait for their turn, and are
answered in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

EACH = 16  # number of requests that start in a round of the event loop, which takes some milliseconds


class Crowd:
    """Runs calls in the order of their arrival, at most ``each`` in a round of the event loop."""

    def __init__(self, each: int = EACH) -> None:
        self._each = each
        self._left = each  # number of calls that may still begin in this round of the event loop
        self._waiting: deque[Callable[[], object]] = deque()
        self._armed = False

    def begin(self, call: Callable[[], object]) -> None:
        """Run a call now, or in a later round if this round has run ``each`` calls or earlier calls wait."""
        if self._left and not self._waiting:
            self._left -= 1
            call()
        else:
            self._waiting.append(call)
        self._arm()

    async def turn(self) -> None:
        """Wait for a round that has room for one more call."""
        come = asyncio.Event()
        self.begin(come.set)
        await come.wait()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._armed = False
        self._left = self._each
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()
        if self._left < self._each:
            self._arm()
