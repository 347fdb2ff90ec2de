"""The door: how many prompts are inside, who has to come back later, and when it closes.

Each owner (a key, or an address where none is needed) has a room of its own, so nobody is turned away because another
has filled it; all rooms together have an end too, beyond which only those get in who have nothing inside.

Invariant: ``inside`` is the number of prompts whose answers are not complete, ``owners`` has it for each owner who has
any; whoever entered leaves once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from minivllm.server.errors import ApiError


class Door:
    """``room`` prompts of an owner at most, those that run and those that wait, and ``most`` of all owners."""

    def __init__(self, room: int, most: int) -> None:
        self.room, self.most, self.inside = room, max(room, most), 0
        self.owners: Counter[str] = Counter()
        self.closed = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # who is still inside has to go
        self.refused = 0

    @contextmanager
    def enter(self, prompts: int, owner: str) -> Iterator[None]:
        """ApiError: 503 when the server is shutting down, 429 when there is no room.  Whoever has nothing inside is let
        in, with a batch larger than the room too."""
        if self.closed:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5", "Connection": "close"})
        mine = self.owners[owner]
        if mine and mine + prompts > self.room:
            self._refuse(f"{mine} prompts of yours run or wait, of at most {self.room}")
        if mine and self.inside + prompts > self.most:
            self._refuse(f"{self.inside} prompts run or wait, of at most {self.most}")
        self.inside += prompts
        self.owners[owner] = mine + prompts
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= prompts
            self.owners[owner] -= prompts
            if not self.owners[owner]:
                del self.owners[owner]
            if not self.inside:
                self._empty.set()

    def _refuse(self, why: str) -> NoReturn:
        self.refused += 1
        raise ApiError(429, f"{why}; try again later", headers={"Retry-After": "1"})

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
