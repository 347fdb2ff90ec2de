"""A crowd of requests that come, or fail, at once: a turn of the event loop begins a few of them, so that no turn is
long and a question for /health, which does not wait, is answered in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

EACH = 16  # requests that a turn begins: some milliseconds


class Crowd:
    """Calls of one event loop, ``EACH`` a turn, in the order in which they came."""

    def __init__(self, each: int = EACH) -> None:
        self._each = self._left = each
        self._waiting: deque[Callable[[], object]] = deque()
        self._armed = False

    def begin(self, call: Callable[[], object]) -> None:
        """Call it now, or in a turn that has room for it."""
        if self._left and not self._waiting:
            self._left -= 1
            call()
        else:
            self._waiting.append(call)
        self._arm()

    async def turn(self) -> None:
        """Wait for a turn that has room."""
        come = asyncio.Event()
        self.begin(come.set)
        await come.wait()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._armed, self._left = False, self._each
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft()()
        if self._left < self._each:
            self._arm()
