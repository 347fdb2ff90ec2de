"""Whose turn it is: slots that many ask for, one at a time of each who asks, and those who wait in turns."""

from __future__ import annotations

import asyncio
from collections import deque

from .errors import ApiError

MOST_WAITING = 256  # of one who asks


class FairSlots:
    """``slots`` at once, and at most one of each asker while there are two or more.

    Invariant: a free slot and an asker without one never wait for each other.  So who sends thousands of jobs delays
    its own, and those of others by one job at most for every other asker who holds a slot.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(reversed(slots))
        self._busy: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[int]]] = {}  # who was served longest ago first

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    async def take(self, who: str, refuses: bool = True) -> int:
        """A slot, which ``give`` gives back.  ApiError (429) if too many jobs of the same asker wait, unless they are
        bounded in another way and not to be refused."""
        queue = self._waiting.get(who)
        if queue is None and who not in self._busy and self._free:
            self._busy.add(who)
            return self._free.pop()
        if refuses and queue is not None and len(queue) >= MOST_WAITING:
            what = f"{len(queue)} of your requests wait to be read"
            raise ApiError(429, f"{what}; try again later", headers={"Retry-After": "1"})
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given a slot at the same moment
                self.give(who, turn.result())
            raise

    def give(self, who: str, slot: int) -> None:
        self._busy.discard(who)
        self._free.append(slot)
        for name in list(self._waiting):
            if not self._free:
                break
            if name not in self._busy:
                self._next(name)

    def _next(self, who: str) -> None:
        """The next job of an asker, if one still waits; then it is the last in turn."""
        queue = self._waiting.pop(who)
        while queue:
            turn = queue.popleft()
            if not turn.done():
                self._busy.add(who)
                turn.set_result(self._free.pop())
                break
        if queue:
            self._waiting[who] = queue
