"""Limit the prompts that the server holds, per owner and in total, and refuse new prompts before the server ends.

An owner is an API key, or an address where no key is required.  Each owner may have a number of prompts, so that no
owner is refused because of another.  There is also a limit on all prompts together.  Beyond it, only owners without any
prompt are accepted.

Invariant: ``inside`` is the number of prompts whose answers are not complete.  ``owners`` has the number of each owner
that has any.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from minivllm.server.errors import ApiError


class Door:
    """Limits running and waiting prompts: ``room`` of one owner, ``most`` of all owners together."""

    def __init__(self, room: int, most: int) -> None:
        self.room = room
        self.most = max(room, most)
        self.inside = 0
        self.owners: Counter[str] = Counter()
        self.closed = False
        self._empty = asyncio.Event()
        self._empty.set()
        # a future that is done when requests that still run must be ended
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refused = 0

    @contextmanager
    def enter(self, prompts: int, owner: str) -> Iterator[None]:
        """Count an owner's prompts as inside within the context.

        Raise ApiError: 503 if the server is shutting down, 429 if there is no room.  An owner without any prompt inside
        is always accepted, even with a batch larger than the room.
        """
        if self.closed:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5", "Connection": "close"})
        held = self.owners[owner]
        if held and held + prompts > self.room:
            self._refuse(f"{held} of your prompts run or wait, of at most {self.room}")
        if held and self.inside + prompts > self.most:
            self._refuse(f"{self.inside} prompts run or wait, of at most {self.most}")
        self.inside += prompts
        self.owners[owner] = held + prompts
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
        """Refuse new prompts, and wait until all answers are complete, which returns True.

        If ``seconds`` are not enough, end the requests that are left, and return False.
        """
        self.closed = True
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
            return True
        except asyncio.TimeoutError:
            self.end()
            return False

    def end(self) -> None:
        """Refuse new prompts, and end all requests that run or wait."""
        self.closed = True
        if not self.ended.done():
            self.ended.set_result(None)
