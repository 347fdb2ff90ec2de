"""Taking connections, as many as there are descriptors for, and what happens when there are no more.

    room left                take it
    no room, some are idle   those that have been idle for longest are closed, as web servers do, to make room
    no room, all work        a few more are taken, for /health and its like; other requests on them get 503
    none of these            nothing is taken until a connection has closed; the kernel lets the next ones wait

asyncio's own server goes on to accept when there is no descriptor, with a traceback for each try.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import logging
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from minivllm.errors import ResourceError
from minivllm.server import logs

from . import unencrypted

FILES = 65536  # that may be open
OWN = 64  # descriptors beside connections and what is open at the start: pipes to processes, files for a moment
SPARE = 16  # connections beyond ``room`` that get an answer to /health and its like
LEAST = 16  # connections without which there is no point in serving
TURN = 64  # connections that are taken in one turn of the loop
AGAIN = 0.2  # seconds after which it is tried again
GOODBYE = 2.0  # seconds for a client to answer the end of TLS, before the connection is closed without
BACKLOG = 2048  # connections that wait in the kernel
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def open_files() -> int:
    """How many files this process may have open, once it may have as many as it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def room_for(files: int) -> int:
    """Connections that so many descriptors allow.  ResourceError if that is next to none."""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not on this system
        used = 32
    room = files - used - OWN - SPARE
    if room < LEAST:
        want = files - room + LEAST
        raise ResourceError(f"the limit of open files is {files}; want at least {want} (ulimit -n {want})")
    return room


class Acceptor:
    """Takes connections of a listening socket while it is not closed.

    ``make()`` gives a protocol for one, ``connections`` are those that are open; one that may be closed for another
    says so by its ``idle`` (0: it asks for nothing, 1: its request has not come as a whole yet, None: it works) and
    since when by ``since``.
    """

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], Any],
        connections: Iterable[Any],
        room: int,
        context: ssl.SSLContext | None = None,
        seconds: float = 10.0,
    ) -> None:
        """``seconds``: for a TLS handshake."""
        self._bound, self._make, self._connections, self.room = bound, make, connections, room
        self._tls: dict[str, Any] = {} if context is None else {"ssl": context}
        self._opening: dict[asyncio.Task[None], float] = {}  # since when
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._told = -float("inf")
        self._closed, self._dropped = False, 0
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._loop.add_reader(bound.fileno(), self._take)

    @property
    def open(self) -> int:
        return len(self._connections) + len(self._opening)  # type: ignore[arg-type]

    def _take(self) -> None:
        for _ in range(TURN):
            over = self.open - self.room
            if over >= 0 and self._make_room():
                return  # the descriptors are free in the next turn
            if over >= SPARE:
                self._wait("every connection works")
                return
            try:
                link, _ = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in FULL:
                    raise
                self._make_room()
                self._wait(os.strerror(exc.errno))
                return
            link.setblocking(False)
            task = self._loop.create_task(self._begin(link, over >= 0))
            self._opening[task] = self._loop.time()
            task.add_done_callback(self._begun)

    async def _begin(self, link: socket.socket, spare: bool) -> None:
        def make() -> Any:
            protocol = self._make()
            protocol.spare = spare
            return protocol

        try:
            tls, start = dict(self._tls), self._loop.time()
            if tls:
                http = await asyncio.wait_for(unencrypted.speaks_http(link), self._seconds)
                if http:
                    await asyncio.wait_for(unencrypted.refuse(link), unencrypted.LINGER)
                    link.close()
                    return
                tls["ssl_handshake_timeout"] = max(self._seconds - (self._loop.time() - start), 0.1)
                if sys.version_info >= (3, 11):  # before, whoever does not say goodbye has all the time it wants
                    tls["ssl_shutdown_timeout"] = GOODBYE
            await self._loop.connect_accepted_socket(make, link, **tls)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):  # it left, says nothing, or had to go
            with contextlib.suppress(OSError):
                link.close()

    def _begun(self, task: asyncio.Task[None]) -> None:
        del self._opening[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.log.error("a connection failed", exc_info=error)

    def _make_room(self) -> int:
        """Close connections that ask for nothing, those first that have done so for longest, and if there is none those
        whose requests are on their way.  How many."""
        most = max(self.room // 16, 1)
        kinds: dict[int, list[Any]] = {0: [], 1: []}
        for one in self._connections:
            if (kind := getattr(one, "idle", None)) is not None:
                kinds[kind].append(one)
        # who has not ended a handshake asks for nothing either
        since = {**{one: one.since for one in kinds[0]}, **(self._opening if self._tls else {})}
        since = since or {one: one.since for one in kinds[1]}
        chosen = heapq.nsmallest(most, since, key=since.__getitem__)
        for one in chosen:
            if one in self._opening:
                one.cancel()
            elif self._tls or one.transport.get_write_buffer_size():
                one.transport.abort()  # what waits to be sent, or TLS's goodbye to be answered, keeps the descriptor
            else:
                one.transport.close()
        self._dropped += len(chosen)
        if chosen:
            self._tell("there is no room for more connections: those that were idle for longest were closed")
        return len(chosen)

    def _wait(self, why: str) -> None:
        """Take nothing for a moment."""
        self._tell(f"there is no room for more connections, which have to wait: {why}")
        self._loop.remove_reader(self._bound.fileno())
        self._later = self._loop.call_later(AGAIN, self._go_on)

    def _go_on(self) -> None:
        self._later = None
        if not self._closed:
            self._loop.add_reader(self._bound.fileno(), self._take)

    def _tell(self, what: str) -> None:
        """At most one line a second."""
        if (now := time.monotonic()) - self._told >= 1.0:
            self._told = now
            logs.event(what, logging.WARNING, open=self.open, room=self.room, closed=self._dropped)
            self._dropped = 0

    def close(self) -> None:
        """Take no more.  Idempotent; the socket stays open."""
        if self._closed:
            return
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._bound.fileno())
        for task in list(self._opening):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)
