"""The door: how many prompts are inside, who has to come back later, and when it closes.

Invariant: ``inside`` is the number of prompts whose answers are not complete; whoever entered leaves once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ApiError


class Door:
    """``room`` prompts at most, those that run and those that wait."""

    def __init__(self, room: int) -> None:
        self.room, self.inside = room, 0
        self.closed = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # who is still inside has to go
        self.refused = 0

    @contextmanager
    def enter(self, prompts: int) -> Iterator[None]:
        """ApiError: 503 when the server is shutting down, 429 when there is no room.  A batch larger than all the room
        is taken when nobody else is inside."""
        if self.closed:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5", "Connection": "close"})
        if self.inside and self.inside + prompts > self.room:
            self.refused += 1
            raise ApiError(
                429, f"{self.inside} prompts run or wait, of at most {self.room}; try again later",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        self.inside += prompts
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= prompts
            if not self.inside:
                self._empty.set()

    async def drain(self, seconds: float) -> bool:
        """Close it and wait until all have left; whether they had within ``seconds``.  The others are sent away."""
        self.closed = True
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
            return True
        except asyncio.TimeoutError:
            self.end()
            return False

    def end(self) -> None:
        """Whoever is inside has to go now."""
        self.closed = True
        if not self.ended.done():
            self.ended.set_result(None)
