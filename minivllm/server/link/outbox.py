"""Requests on their way to an engine in another process, where what is said last may overtake them.

Bytes that were given to a transport cannot be taken back or overtaken.  So it gets what the socket takes and ``HIGH``
bytes more: the other requests wait here, owners in turn, until there is room.  One that is removed costs nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from minivllm.errors import EngineDeadError
from minivllm.server.fair_queue import FairQueue

HIGH = 64 << 10  # bytes that a transport holds before the next request waits here
UNREAD = 64 << 20  # bytes of one owner that an engine may leave unread


class Outbox:
    """One event loop's thread uses it.  Invariant: while requests wait, a task waits for the transport to have room."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._queue = writer, FairQueue[tuple[str, bytes]]()
        writer.transport.set_write_buffer_limits(high=HIGH)
        self._bytes: Counter[str] = Counter()  # that wait, by owner
        self._pushing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, owner: str, number: int, data: bytes) -> None:
        """EngineDeadError if too much of this owner waits already."""
        if self._bytes[owner] + len(data) > UNREAD:
            raise EngineDeadError("the engine does not read what it is told")
        self._queue.push(owner, number, (owner, data))
        self._bytes[owner] += len(data)
        self._push()
        if self._queue and self._pushing is None:
            self._pushing = asyncio.create_task(self._push_on())

    def remove(self, number: int) -> bool:
        """Whether the request was still here; it will not be sent."""
        found = self._queue.remove(number)
        if found is not None:
            self._count(*found)
        return found is not None

    def _push(self) -> None:
        while self._queue and self._writer.transport.get_write_buffer_size() <= HIGH:
            next_up = self._queue.pop()
            assert next_up is not None
            self._count(*next_up[2])
            self._writer.write(next_up[2][1])

    async def _push_on(self) -> None:
        try:
            with contextlib.suppress(ConnectionError):  # the engine is gone: its client hears of it
                while self._queue:
                    await self._writer.drain()
                    self._push()
        finally:
            self._pushing = None

    def _count(self, owner: str, data: bytes) -> None:
        self._bytes[owner] -= len(data)
        if not self._bytes[owner]:
            del self._bytes[owner]

    def close(self) -> None:
        """Nothing more is sent."""
        self._queue.clear()
        self._bytes.clear()
        if self._pushing is not None:
            self._pushing.cancel()
