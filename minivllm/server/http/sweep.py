"""End connections whose clients do not read what the server sends.

asyncio keeps a closed transport until its buffer is empty.  If the client's program does not read while its kernel
keeps the connection alive, the buffer stays full for ever, and its descriptor and memory are never freed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from minivllm.server.fair_queue import owner_of

SMALL = 64 << 10  # number of unsent bytes of a connection that are not counted, since a stream may have as many
UNREAD = 256 << 20  # largest number of unsent bytes on all connections of one address


class Sweep:
    """Aborts connections without progress.

    ``look`` must be called regularly with all connections.  It aborts a connection whose unsent bytes have not
    decreased for ``seconds``.  A client that reads slowly makes progress, because no data is added to a buffer above
    its high-water mark.  If an address has more than ``unread`` unsent bytes, its connections with most of them are
    aborted.
    """

    def __init__(self, seconds: float, unread: int = UNREAD) -> None:
        self.seconds, self.unread = seconds, unread
        # connection -> (number of unsent bytes, time since which it has not decreased)
        self._stuck: WeakKeyDictionary[Any, tuple[int, float]] = WeakKeyDictionary()

    def look(self, connections: Iterable[Any]) -> None:
        """Check all connections and abort those without progress or with too much unread data."""
        now = time.monotonic()
        unsent_of = defaultdict[str, list[tuple[int, Any]]](list)  # address -> (unsent bytes, transport)
        for connection in list(connections):
            transport = connection.transport
            size = 0 if transport is None else transport.get_write_buffer_size()
            before, since = self._stuck.get(connection, (0, now))
            if not size:
                self._stuck.pop(connection, None)
            elif not before or size < before:
                self._stuck[connection] = size, now
            elif now - since > self.seconds:
                self._stuck.pop(connection, None)
                transport.abort()
            else:
                self._stuck[connection] = size, since
            if size > SMALL:
                address = owner_of("", getattr(connection, "client", None))
                unsent_of[address].append((size, transport))
        for unsent in unsent_of.values():
            excess = sum(size for size, _ in unsent) - self.unread
            for size, transport in sorted(unsent, key=lambda pair: -pair[0]):
                if excess > 0:
                    transport.abort()
                excess -= size
