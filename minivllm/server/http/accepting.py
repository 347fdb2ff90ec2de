"""Accept connections, with a limit that follows from the number of file descriptors.

    room left                  accept the connection
    no room, some are idle     close the connections that have been idle for longest, as web servers do; not those of
                               the last 0.2 s, whose request may have been sent
    no room, none is idle      accept a few spare connections for /health, /ready and /metrics; other requests get 503
    no room, no spare          accept none until a connection has closed; new connections wait in the kernel

asyncio's own server keeps trying to accept when there is no descriptor, and logs a traceback for each try.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import logging
import os
import resource
import select
import socket
import ssl
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

from minivllm.errors import ResourceError
from minivllm.server import logs

from . import unencrypted

FILES = 65536  # limit of open files that the server requests
OWN = 64  # number of file descriptors reserved for pipes to processes and for files
SPARE = 16  # number of connections beyond ``room``, for /health, /ready and /metrics
LEAST = 16  # least number of connections; with fewer the server does not start
TURN = 64  # largest number of connections that are accepted in one round of the event loop
AGAIN = 0.2  # seconds until the next try to accept, and seconds for which an idle connection is not closed
GOODBYE = 2.0  # time limit in seconds for a client's answer to the end of TLS
BACKLOG = 2048  # largest number of connections that wait in the kernel
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def open_files() -> int:
    """Raise the process's limit of open files as far as allowed, at most to ``FILES``, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def room_for(files: int) -> int:
    """Return the number of connections that a limit of open files allows.

    Raise ResourceError if it is less than ``LEAST``.
    """
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # this system has no /proc
        used = 32  # a guess
    room = files - used - OWN - SPARE
    if room < LEAST:
        need = files - room + LEAST
        raise ResourceError(f"the limit of open files is {files}; expected at least {need} (ulimit -n {need})")
    return room


class Acceptor:
    """Accepts the connections of a listening socket until it is closed.

    ``make()`` returns an asyncio protocol for a new connection.  ``connections`` are the open connections, and ``room``
    is their limit.  A connection's ``idle`` is 0 if it has no request, 1 if its request is incomplete, and None if its
    request is being served.  ``since`` is the time of the last change of ``idle``.
    """

    def __init__(
        self,
        bound: socket.socket,
        make: Callable[[], Any],
        connections: Collection[Any],
        room: int,
        context: ssl.SSLContext | None = None,
        seconds: float = 10.0,
    ) -> None:
        """Start to accept.  With TLS (``context``), a handshake may take ``seconds``."""
        self.room = room
        self._bound = bound
        self._make = make
        self._connections = connections
        self._tls: dict[str, Any] = {} if context is None else {"ssl": context}
        self._opening: dict[asyncio.Task[None], float] = {}  # task that sets a connection up -> time of its start
        # task that sets a connection up -> protocol of the connection, once it exists
        self._made: dict[asyncio.Task[None], Any] = {}
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._logged = -float("inf")  # time of the last warning
        self._closed = False
        self._dropped = 0  # idle connections closed since the last log line
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._loop.add_reader(bound.fileno(), self._take)

    @property
    def open(self) -> int:
        """Return the number of connections that are open or being set up."""
        counted_twice = sum(protocol in self._connections for protocol in self._made.values())
        return len(self._connections) + len(self._opening) - counted_twice

    def _take(self) -> None:
        """Accept waiting connections, called by the event loop when there are any.  Beyond the limit, idle connections
        are closed first, or the waiting ones wait."""
        for _ in range(TURN):
            over = self.open - self.room
            if over >= 0 and not self._has_waiting():
                return
            if over >= 0 and self._make_room():
                return  # the descriptors are freed in the next round of the event loop
            if over >= SPARE:
                self._wait("no connection is idle")
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

    def _has_waiting(self) -> bool:
        """Return whether a connection waits in the kernel to be accepted."""
        poll = select.poll()
        poll.register(self._bound.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def _begin(self, link: socket.socket, spare: bool) -> None:
        """Set up an accepted connection, with a TLS handshake if the server uses TLS."""

        task = asyncio.current_task()
        assert task is not None

        def make() -> Any:
            protocol = self._made[task] = self._make()
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
                if sys.version_info >= (3, 11):  # older Python versions lack the argument ssl_shutdown_timeout
                    tls["ssl_shutdown_timeout"] = GOODBYE
            await self._loop.connect_accepted_socket(make, link, **tls)
        # CancelledError means that ``_make_room`` or ``close`` closes the connection
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(OSError):
                link.close()

    def _begun(self, task: asyncio.Task[None]) -> None:
        del self._opening[task]
        self._made.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.log.error("a connection failed", exc_info=error)

    def _make_room(self) -> int:
        """Close some idle connections, the longest idle first, and return their number.

        Connections without a request are closed first.  If there are none, connections whose request is not complete
        are closed.  The request of a connection that is idle for less than ``AGAIN`` may not have been read yet.
        """
        most = max(self.room // 16, 1)
        empty: dict[Any, float] = {}  # connection, or task that sets it up -> time since which it is idle
        incomplete: dict[Any, float] = {}
        for connection in self._connections:
            kind = getattr(connection, "idle", None)
            if kind is not None:
                since = incomplete if kind else empty
                since[connection] = connection.since
        # A connection whose TLS handshake is not complete has no request, and may be closed too.
        if self._tls:
            empty.update(self._opening)
        since = empty or incomplete
        latest = self._loop.time() - AGAIN
        chosen = [one for one in heapq.nsmallest(most, since, key=since.__getitem__) if since[one] <= latest]
        for one in chosen:
            if one in self._opening:
                one.cancel()
            elif self._tls or one.transport.get_write_buffer_size():
                one.transport.abort()  # close() would keep the descriptor until data is sent or TLS's end is answered
            else:
                one.transport.close()
        self._dropped += len(chosen)
        if chosen:
            self._log("there is no room for more connections: those that were idle for longest were closed")
        return len(chosen)

    def _wait(self, why: str) -> None:
        """Accept no connections for ``AGAIN`` seconds, and log the reason ``why``."""
        self._log(f"there is no room for more connections, which have to wait: {why}")
        self._loop.remove_reader(self._bound.fileno())
        self._later = self._loop.call_later(AGAIN, self._resume)

    def _resume(self) -> None:
        self._later = None
        if not self._closed:
            self._loop.add_reader(self._bound.fileno(), self._take)

    def _log(self, message: str) -> None:
        """Log a warning, at most one a second."""
        now = time.monotonic()
        if now - self._logged >= 1.0:
            self._logged = now
            logs.event(message, logging.WARNING, open=self.open, room=self.room, closed=self._dropped)
            self._dropped = 0

    def close(self) -> None:
        """Stop accepting.  The socket stays open.  A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._bound.fileno())
        for task in list(self._opening):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no connection is being set up."""
        await asyncio.gather(*self._opening, return_exceptions=True)
