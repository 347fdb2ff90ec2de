"""Connections that take nothing of what they are sent are ended, whatever they carry.

A closed transport of asyncio waits until its buffer is empty, and a peer whose kernel answers but whose program does
not read keeps it full for ever: its descriptor and its memory would never come back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from minivllm.server.fair_queue import owner_of

SMALL = 64 << 10  # unsent bytes of a connection that count for nothing: what a stream may have
UNREAD = 256 << 20  # unsent bytes of one address, on all its connections


class Sweep:
    """``look`` is called now and then with all connections; one whose unsent bytes have not become fewer for
    ``seconds`` is aborted.  Who reads slowly shows progress: nothing is added above the buffer's high mark.  An address
    that leaves more than ``unread`` bytes, however slowly it reads, loses the connections with most of them."""

    def __init__(self, seconds: float, unread: int = UNREAD) -> None:
        self.seconds, self.unread = seconds, unread
        self._stuck: WeakKeyDictionary[Any, tuple[int, float]] = WeakKeyDictionary()  # unsent bytes, since when

    def look(self, connections: Iterable[Any]) -> None:
        now, left = time.monotonic(), defaultdict[str, list[tuple[int, Any]]](list)
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
                left[owner_of("", getattr(connection, "client", None))].append((size, transport))
        for unsent in left.values():
            much = sum(size for size, _ in unsent) - self.unread
            for size, transport in sorted(unsent, key=lambda one: -one[0]):
                if much > 0:
                    transport.abort()
                much -= size
