"""uvicorn's HTTP connection with a deadline and a bound for headers, so that who sends half a request holds nothing.

It notices a client that leaves though it has sent requests ahead of the answers (pipelining).  It reads little at a
time: what a client sends in one piece, thousands of requests or chunks of one byte, is not one turn of the loop."""

from __future__ import annotations

import json
import math
import time
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config

from minivllm.server.errors import ApiError

CROWDED = "the server has as many connections as it can; try again later"
BESIDE = "the request has more headers, trailers or extensions of chunks than it may"
SLACK = 8  # times the limit on headers: what is over the limit, but within this, gets an answer that says so

READ = 16 << 10  # bytes that are read in one turn of the event loop: of one-byte chunks a few milliseconds
AHEAD, AHEAD_BYTES = 64, 1 << 16  # requests, and bytes of the last one's body, that may be sent ahead of an answer


def response(status: int, what: str) -> bytes:
    """The whole answer to what never becomes a request; the connection ends with it."""
    body = json.dumps(ApiError(status, what).body()).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    """An application, because a Config wants one."""


_Connection: Any = object  # in fact one of uvicorn's classes; which, its Config decides


class Direct:
    """Writes parts of the body of an answer in chunks as they come, without a task and its turn of the event loop.

    Where it says no, nothing was written: before the head of the answer, behind its end, and while the client does not
    read, ``send`` of ASGI is the way."""

    def __init__(self, cycle: Any) -> None:
        self._cycle, self._flow, self._put = cycle, cycle.flow, cycle.transport.write
        self.last = -math.inf  # time.monotonic of the last part

    def write(self, part: bytes) -> bool:
        """Whether ``part``, which is not empty, was written."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        self._put(b"%x\r\n%b\r\n" % (len(part), part))
        self.last = time.monotonic()
        return True


class WatchedConnection(_Connection):
    """What uvicorn's connections lack; ``protocol`` puts it before one of uvicorn's classes.

    Invariant: ``_late`` is set while a request's headers are waited for after its first byte, or after the connection
    was made."""

    header_seconds: float
    header_bytes: int
    room: int
    spare, since = False, 0.0

    @property
    def idle(self) -> int | None:
        """For ``Acceptor``."""
        if self.cycle is None or (self.cycle.response_complete and not getattr(self, "pipeline", ())):
            return 0
        return 1 if self.cycle.more_body and not self.cycle.response_started else None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        read_little(transport, READ)
        self.since = self.loop.time()
        self._come, self._late = 0, self.loop.call_later(self.header_seconds, self._close)
        self._answered: Any = None  # the request that is being answered; ``cycle`` is the one that came last

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered, self.since = cycle, self.loop.time()
        cycle.scope["state"]["spare"] = self._is_spare()
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def handle_websocket_upgrade(self) -> None:
        if self._is_spare():
            self._answer(503, CROWDED)
            return
        super().handle_websocket_upgrade()

    def _is_spare(self) -> bool:
        self.spare = self.spare and len(self.connections) > self.room
        return self.spare

    def data_received(self, data: bytes) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        before = self.cycle
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # it has become a WebSocket
            self._stop()
            return
        if waiting := getattr(self, "pipeline", ()):
            if len(waiting) > AHEAD or len(self.cycle.body) > AHEAD_BYTES:
                self.transport.abort()
            elif not self.transport.is_closing():
                self.flow.resume_reading()  # who is not read from is not seen to leave
        if busy or self.cycle is not before:  # this is a body, or a request has begun
            self._come = 0
            self._stop()
            return
        self._come += len(data)
        if self._come > SLACK * self.header_bytes and not self.transport.is_closing():
            self.send_400_response("the headers are too large")
        elif self._late is None:
            self._late = self.loop.call_later(self.header_seconds, self._close)

    def send_400_response(self, msg: str) -> None:
        self._answer(400, "this is no HTTP request")

    def _answer(self, status: int, what: str) -> None:
        self.transport.write(response(status, what))
        self.transport.close()

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()


class Framed(WatchedConnection):
    """For httptools, which gives bounds to nothing: what a request has beside its body (its line and headers, sizes and
    extensions of chunks, trailers) is bounded from its first byte to its last, and trailers are dropped.

    Invariant: ``_beside`` is the number of bytes since the request began that were none of its body's, up to what one
    read of the connection brought of the request before it."""

    def connection_made(self, transport: Any) -> None:
        self._beside, self._in_head = 0, True
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        self._beside, self._in_head = 0, True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer would be one header more of a request that has been looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.scope["state"]["direct"] = Direct(cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self._beside -= 2 * len(body)  # once for itself, and as much may be beside it
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        self._beside += len(data)
        super().data_received(data)
        if self._beside > SLACK * self.header_bytes and not self.transport.is_closing():
            self.transport.abort() if self._is_answered() else self._answer(431, BESIDE)

    def _is_answered(self) -> bool:
        """Whether an answer has begun, into which no other can be written."""
        now = self._answered
        return now is not None and now.response_started and not now.response_complete


def read_little(transport: Any, size: int) -> None:
    """So many bytes at most come in one turn of the loop: asyncio reads 256 KiB, which may be 40,000 small things."""
    inner = getattr(transport, "_ssl_protocol", None)  # of TLS: what it decrypts, it gives on at once
    if inner is not None and hasattr(inner, "_ssl_buffer_view"):
        inner.max_size, inner._ssl_buffer = size, bytearray(size)
        inner._ssl_buffer_view = memoryview(inner._ssl_buffer)
    transport.max_size = size


def protocol(seconds: float, header_bytes: int, room: int) -> type[Any]:
    """The class of connections whose headers must have come after ``seconds``; httptools' where it is installed.
    ``room``: connections beyond which new ones are ``spare`` (see ``accepting``)."""
    config = Config(_nobody, log_config=None)
    config.load()
    limits = {"header_seconds": seconds, "header_bytes": header_bytes, "room": room}
    kind: Any = config.http_protocol_class
    return type("Connection", (Framed if hasattr(kind, "on_body") else WatchedConnection, kind), limits)
