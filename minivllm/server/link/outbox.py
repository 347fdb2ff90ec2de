"""Queue the requests that are to be sent to an engine in another process, so that aborts can overtake or remove them.

Bytes given to an asyncio transport can be neither taken back nor overtaken.  So the transport holds at most ``HIGH``
bytes more than the socket accepts.  Other requests wait here, owners in turn.  A removed request costs nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from minivllm.errors import EngineDeadError
from minivllm.server.fair_queue import FairQueue

HIGH = 64 << 10  # number of unsent bytes in the transport from which on frames wait in this queue
UNREAD = 64 << 20  # largest number of bytes of an owner's requests that may wait


class Outbox:
    """The waiting requests, used only by the event loop's thread.

    Invariant: while requests wait, a task waits for room in the transport.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._queue = writer, FairQueue[tuple[str, bytes]]()
        writer.transport.set_write_buffer_limits(high=HIGH)
        self._bytes: Counter[str] = Counter()  # owner -> waiting bytes
        self._pushing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, owner: str, number: int, data: bytes) -> None:
        """Send a request now or later.  Raise EngineDeadError if too many bytes of the owner wait already."""
        if self._bytes[owner] + len(data) > UNREAD:
            raise EngineDeadError("the engine does not read its requests: too many bytes wait to be sent")
        self._queue.push(owner, number, (owner, data))
        self._bytes[owner] += len(data)
        self._push()
        if self._queue and self._pushing is None:
            self._pushing = asyncio.create_task(self._push_on())

    def remove(self, number: int) -> bool:
        """Remove a request, which will not be sent.  Return whether it was still waiting."""
        found = self._queue.remove(number)
        if found is not None:
            self._count(*found)
        return found is not None

    def _push(self) -> None:
        """Pass waiting requests to the transport until the transport is full."""
        while self._queue and self._writer.transport.get_write_buffer_size() <= HIGH:
            next_up = self._queue.pop()
            assert next_up is not None
            owner, _, (_, data) = next_up
            self._count(owner, data)
            self._writer.write(data)

    async def _push_on(self) -> None:
        """Send the waiting requests as the transport gets room."""
        try:
            with contextlib.suppress(ConnectionError):  # the client detects a dead engine separately
                while self._queue:
                    await self._writer.drain()
                    self._push()
        finally:
            self._pushing = None

    def _count(self, owner: str, data: bytes) -> None:
        """Count the bytes of a request as no longer waiting."""
        self._bytes[owner] -= len(data)
        if not self._bytes[owner]:
            del self._bytes[owner]

    def close(self) -> None:
        """Drop all waiting requests."""
        self._queue.clear()
        self._bytes.clear()
        if self._pushing is not None:
            self._pushing.cancel()
