"""A fixed number of slots that owners (API keys or addresses) take in turns, each at most one at a time."""

from __future__ import annotations

import asyncio
from collections import deque

from .errors import ApiError

MOST_WAITING = 256  # limit of an owner's waiting jobs


class FairSlots:
    """Slots for the jobs of owners (see ``fair_queue``).  Each owner holds at most one slot.

    Invariant: while a slot is free, every waiting owner already holds a slot.  So an owner with thousands of jobs
    delays another owner by at most one job.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(reversed(slots))
        self._busy: set[str] = set()
        # owner -> futures of its waiting jobs; the owner that was served longest ago is first
        self._waiting: dict[str, deque[asyncio.Future[int]]] = {}

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: str, refuses: bool = True) -> int:
        """Wait for a slot and return it.  The caller must release it by ``give``.

        Raise ApiError (429) if the owner has too many waiting jobs.  ``refuses=False`` lets a job wait in any case.
        """
        queue = self._waiting.get(owner)
        if queue is None and owner not in self._busy and self._free:
            self._busy.add(owner)
            return self._free.pop()
        if refuses and queue is not None and len(queue) >= MOST_WAITING:
            problem = f"{len(queue)} of your requests wait to be read"
            raise ApiError(429, f"{problem}; try again later", headers={"Retry-After": "1"})
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            # the slot was assigned in the same round of the event loop in which the task was cancelled
            if turn.done() and not turn.cancelled():
                self.give(owner, turn.result())
            raise

    def give(self, owner: str, slot: int) -> None:
        """Release an owner's slot and hand free slots to the owners that wait."""
        self._busy.discard(owner)
        self._free.append(slot)
        for name in list(self._waiting):
            if not self._free:
                break
            if name not in self._busy:
                self._next(name)

    def _next(self, owner: str) -> None:
        """Assign a slot to the oldest waiting job of an owner, and move the owner to the end of the order.

        Jobs that were cancelled while they waited are dropped.
        """
        queue = self._waiting.pop(owner)
        while queue:
            turn = queue.popleft()
            if not turn.done():
                self._busy.add(owner)
                turn.set_result(self._free.pop())
                break
        if queue:
            self._waiting[owner] = queue
