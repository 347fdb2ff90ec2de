"""uvicorn's HTTP connection with a deadline and a bound for headers, so that half a request holds nothing.

It notices a client that leaves though it has sent requests ahead of the answers (pipelining), and answers one that has
only ended its own side.  It reads little at a time: what a client sends in one piece, thousands of requests or chunks
of one byte, is not one turn of the loop.  What is no request is answered with a reason, behind the answers that are
due, and what still comes is dropped for a while, since a connection that closes before it is reset, answer and all.
"""

from __future__ import annotations

import json
import math
import re
import socket
import sys
import time
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl

from minivllm.server.errors import ApiError, printable

from . import cross_site
from .crowd import Crowd

CROWDED = "the server has as many connections as it can; try again later"
BESIDE = "the request has more headers, trailers or extensions of chunks than it may"
SLACK = 8  # times the limit on headers: what is over the limit, but within this, gets an answer that says so

READ = 16 << 10  # bytes that are read in one turn of the event loop: of one-byte chunks a few milliseconds
# requests, and bytes of the last one's body, that may be sent ahead of an answer; what is beyond waits in the kernel
AHEAD, AHEAD_BYTES = 64, 1 << 16
LINGER_SECONDS, LINGER_BYTES = 2.0, 8 << 20  # for what still comes behind a last answer
PROBES = 0.02, 1.0  # seconds between looks whether a client has left: the first, the longest
ASK = 0.1  # seconds between looks from which on each comes with an interim answer
POLLED = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds, whatever else goes on
OLD = ("0.9", "1.0")
NO_REQUEST = "this is no HTTP request"
METHOD = re.compile(rb"[A-Z-]{1,24} [!-~]{1,8192} HTTP/[0-9]")
VERSION = re.compile(rb"[A-Z-]{1,24} [!-~]{1,8192} HTTP/(?!1\.[01]\r?\n)[0-9.]{1,8}\r?\n")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


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


class Flow(FlowControl):
    """uvicorn's, that does not read on while a connection is ``full``."""

    def __init__(self, transport: Any, connection: Any) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.full:
            super().resume_reading()


class WatchedConnection(_Connection):
    """What uvicorn's connections lack; ``protocol`` puts it before one of uvicorn's classes.

    Invariant: ``_late`` is set while a request's headers are waited for after its first byte, or after the connection
    was made."""

    header_seconds: float
    header_bytes: int
    room: int
    crowd: Crowd
    spare, since = False, 0.0

    @property
    def idle(self) -> int | None:
        """For ``Acceptor``."""
        if self.cycle is None or (self.cycle.response_complete and not getattr(self, "pipeline", ())):
            return 0
        return 1 if self.cycle.more_body and not self.cycle.response_started else None

    @property
    def full(self) -> bool:
        """Whether as much waits for its turn as may be sent ahead of an answer."""
        waiting = getattr(self, "pipeline", ())
        return bool(waiting) and (len(waiting) > AHEAD or len(self.cycle.body) > AHEAD_BYTES)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        read_little(transport, READ)
        self.flow = Flow(transport, self)
        self.since = self.loop.time()
        self._come, self._late = 0, self.loop.call_later(self.header_seconds, self._close)
        self._answered: Any = None  # the request that is being answered; ``cycle`` is the one that came last
        self._last: tuple[int, str] | None = None  # the answer after which the connection ends: nothing more is read
        self._dropped = 0  # bytes since then
        self._half_closed = False  # the client sends nothing more
        self._watching = False  # ``_watch_client`` is to look again

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered, self.since = cycle, self.loop.time()
        cycle.scope["state"]["spare"] = self._is_spare()
        if cycle.scope["http_version"] in OLD:
            cycle.send = Unchunked(cycle).send
        begin = partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["path"].removeprefix(cycle.scope["root_path"]) in POLLED:
            begin()
        else:
            self.crowd.begin(begin)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        if self._is_pending() or self.transport.is_closing():
            return
        if self._last is not None:
            self._say_last()
        elif self._half_closed:
            self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        if self._is_spare():
            self._refuse(503, CROWDED)
            return
        super().handle_websocket_upgrade()

    def _is_spare(self) -> bool:
        self.spare = self.spare and len(self.connections) > self.room
        return self.spare

    def _is_pending(self) -> bool:
        """Whether an answer is due."""
        now = self._answered
        return bool(getattr(self, "pipeline", ())) or (now is not None and not now.response_complete)

    def data_received(self, data: bytes) -> None:
        if self._last is not None:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        busy = self.cycle is not None and not self.cycle.response_complete
        before = self.cycle
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # it has become a WebSocket
            self._stop()
            return
        if self._last is not None:
            return
        if getattr(self, "pipeline", ()) and not self.transport.is_closing():
            self.flow.resume_reading()  # unless it is full
            if self.full:
                self._start_watching()
        if busy or self.cycle is not before:  # this is a body, or a request has begun
            self._come = 0
            self._stop()
            return
        self._come += len(data)
        if self._come > SLACK * self.header_bytes:
            self._refuse(*self._excess())
        elif self._late is None:
            self._late = self.loop.call_later(self.header_seconds, self._close)

    def eof_received(self) -> bool:
        """The client sends nothing more.  Return whether the connection stays open: for answers that are due.

        Whether the client still reads, only the answer to what is sent tells, so it gets an interim one."""
        if self._last is not None or not self._is_pending() or self.transport.get_extra_info("sslcontext") is not None:
            return False
        if self.cycle.more_body and not self.cycle.response_complete:
            self._refuse(400, "the connection ended before the body was whole")
            return self._is_pending()
        self._half_closed = True
        self._stop()
        self._send_interim()
        self._start_watching()
        return True

    def _watch_client(self, seconds: float) -> None:
        """Look whether the client has left, and look again in ``seconds``, then in longer steps.

        Nothing is read from a full connection, so the end of the client's side waits behind the requests that were sent
        ahead; a client that has ended its side may still read.  One that has left refuses an interim answer (RFC 9110
        allows any number of them)."""
        self._watching = (self.full or self._half_closed) and not self.transport.is_closing()
        if not self._watching:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if seconds >= ASK:
            self._send_interim()
        seconds = min(2 * seconds, PROBES[1])
        self.loop.call_later(seconds, self._watch_client, seconds)

    def _start_watching(self) -> None:
        """Begin to look whether the client has left, unless that goes on."""
        if not self._watching:
            self._watching = True
            self.loop.call_later(PROBES[0], self._watch_client, PROBES[0])

    def _send_interim(self) -> None:
        """Write 100 Continue, if the answer that is due has not begun and its client knows interim answers."""
        now = self._answered
        if not now.response_started and now.scope["http_version"] not in OLD:
            self.transport.write(CONTINUE)

    def _excess(self) -> tuple[int, str]:
        """Return status and words for a request that has too much beside its body."""
        return 431, BESIDE

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, NO_REQUEST)

    def _refuse(self, status: int, what: str) -> None:
        """Answer what never becomes a request, behind all answers that are due, and end the connection."""
        if self._last is not None or self.transport.is_closing():
            return
        self._last = status, what
        self._stop()
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_complete:  # its body is what went wrong
            if cycle is not self._answered:
                self.pipeline.popleft()
            elif cycle.response_started:
                self.transport.abort()
                return
            else:
                cycle.disconnected = True
                cycle.message_event.set()
                self._say_last()
                return
        if not self._is_pending():
            self._say_last()

    def _say_last(self) -> None:
        assert self._last is not None
        self.transport.write(response(*self._last))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self._close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()


class Unchunked:
    """Sends an answer to a client of HTTP/1.0, which knows no chunks: without Content-Length its body ends with the
    connection."""

    def __init__(self, cycle: Any) -> None:
        self._cycle, self._send, self._open = cycle, cycle.send, False

    async def send(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._open = b"content-length" not in names
            if self._open:
                cycle.chunked_encoding = False
        elif self._open:
            cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class Framed(WatchedConnection):
    """For httptools, which gives bounds to nothing: what a request has beside its body (its line and headers, sizes and
    extensions of chunks, trailers) is bounded from its first byte to its last, and trailers are dropped.

    Invariant: ``_beside`` is the number of bytes since the request began that were none of its body's, up to what one
    read of the connection brought of the request before it."""

    parser: Any
    url: bytes

    def connection_made(self, transport: Any) -> None:
        self._beside, self._in_head, self._data, self.url = 0, True, b"", b""
        self._switching = False  # the request wants another protocol than a WebSocket
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        self._beside, self._in_head = 0, True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer would be one header more of a request that has been looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._switching = self.parser.should_upgrade() and not self._should_upgrade()
        if not self._switching:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._switching:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Read a request that offers another protocol (HTTP/2, say) as if it did not: the parser, which has stopped
        behind its headers, begins anew with what is left of them."""
        error = sys.exc_info()[1]
        rest = self._data[error.args[0] :] if error is not None else b""
        self._switching, method = False, self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(501, "this is no proxy: CONNECT is not served")
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(part for part in value.split(b",") if part.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = type(self.parser)(self)
        super().data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.scope["state"]["direct"] = Direct(cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self._beside -= 2 * len(body)  # once for itself, and as much may be beside it
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        self._beside += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._last is None and self._beside > SLACK * self.header_bytes:
            self._refuse(*self._excess())

    def _excess(self) -> tuple[int, str]:
        if self._in_head and self.url and not self.headers:
            return 414, f"the URL has more than {self.header_bytes} bytes"
        return super()._excess()

    def send_400_response(self, msg: str) -> None:
        codings = cross_site.values(self.headers or (), b"transfer-encoding")
        if odd := unknown_coding(codings):
            self._refuse(501, odd)
        else:
            self._refuse(*no_request(sys.exc_info()[1], self._data))


def unknown_coding(values: Iterable[str]) -> str:
    """Return what is wrong with a Transfer-Encoding that is not "chunked"; "" if nothing is."""
    odd = [part.strip() for value in values for part in value.split(",") if part.strip().lower() != "chunked"]
    return f"Transfer-Encoding: {printable(odd[0], 40)} is not served; want chunked alone" if odd else ""


def no_request(error: BaseException | None, data: bytes) -> tuple[int, str]:
    """Return status and words for bytes that the parser refuses."""
    why = f"{NO_REQUEST}: {error}" if error is not None and str(error) else NO_REQUEST
    if VERSION.match(data):
        return 505, "the version of HTTP is not served: want HTTP/1.1"
    odd = data.split(b" ")[0]
    if type(error).__name__ == "HttpParserInvalidMethodError" and METHOD.match(data) and odd not in (b"GET", b"POST"):
        return 501, f"the method {odd.decode()} is not served"
    return 400, why


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
    limits = {"header_seconds": seconds, "header_bytes": header_bytes, "room": room, "crowd": Crowd()}
    kind: Any = config.http_protocol_class
    return type("Connection", (Framed if hasattr(kind, "on_body") else WatchedConnection, kind), limits)
