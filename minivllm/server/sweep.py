"""Connections that take nothing of what they are sent are ended, whatever they carry.

A closed transport of asyncio waits until its buffer is empty, and a peer whose kernel answers but whose program does
not read keeps it full for ever: its descriptor and its memory would never come back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary


class Sweep:
    """``look`` is called now and then with all connections; one whose unsent bytes have not become fewer for
    ``seconds`` is aborted.  Who reads slowly shows progress: nothing is added above the buffer's high mark."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._stuck: WeakKeyDictionary[Any, tuple[int, float]] = WeakKeyDictionary()  # unsent bytes, since when

    def look(self, connections: Iterable[Any]) -> None:
        now = time.monotonic()
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
