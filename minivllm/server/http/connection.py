"""uvicorn's HTTP connection with limits, so that slow, hostile or departed clients hold no resources.

* A request's line and headers must arrive within a time, and have at most a number of bytes.
* A client may send requests ahead of the answers (pipelining).  A client that leaves is noticed even then.  A client
  that has closed only its sending side still gets its answers.
* Little is read at a time, so that thousands of tiny requests or chunks in one piece do not delay the event loop.
* Bytes that are not an HTTP request are answered with the reason, after all earlier answers.  Later bytes of the client
  are dropped for a while.  Otherwise the kernel would reset a connection that closes with unread data, and the answer
  would be lost.
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

CROWDED = "the server has no room for more connections; try again later"
BESIDE = "the request has too many bytes of headers, trailers or chunk extensions"
SLACK = (
    # factor of the limit of headers up to which a request is read, so that the client receives an answer with the
    # reason
    8
)

# number of bytes that are read in one round of the event loop; as one-byte chunks they take a few milliseconds
READ = 16 << 10
# limits of requests, and of bytes of the last one's body, that are sent ahead of an answer; more waits in the kernel
AHEAD, AHEAD_BYTES = 64, 1 << 16
LINGER_SECONDS, LINGER_BYTES = 2.0, 8 << 20  # limits of data that is dropped after the last answer of a connection
PROBES = 0.02, 1.0  # seconds between checks whether a client has left: the first, and the largest
INTERIM = 0.1  # interval in seconds from which on each check also sends an interim answer
POLLED = frozenset({"/health", "/ping", "/ready", "/metrics"})  # paths that monitoring requests every few seconds
OLD = ("0.9", "1.0")  # versions of HTTP without chunks and interim answers
NO_REQUEST = "this is not an HTTP request"
METHOD = re.compile(rb"[A-Z-]{1,24} [!-~]{1,8192} HTTP/[0-9]")
VERSION = re.compile(rb"[A-Z-]{1,24} [!-~]{1,8192} HTTP/(?!1\.[01]\r?\n)[0-9.]{1,8}\r?\n")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def response(status: int, message: str) -> bytes:
    """Return an error answer to bytes that are not a request, after which the connection closes."""
    body = json.dumps(ApiError(status, message).body()).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    """Do nothing.  uvicorn's Config requires an application."""


_Connection: Any = object  # for the type checker only; ``protocol`` adds the real base class, one of uvicorn's


class Direct:
    """Writes parts of an answer's body directly to the connection, without waking a task.

    If ``write`` returns False, no data was written, and the caller must use ASGI's ``send``.  This is the case before
    the headers of the answer, after its end, and while the client does not read.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle  # uvicorn's state of the current request
        self._flow = cycle.flow
        self._put = cycle.transport.write
        self.last = -math.inf  # time.monotonic() at which the last part was sent

    def write(self, part: bytes) -> bool:
        """Write a part of the body, which must not be empty, as a chunk.  Return whether it was written."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        self._put(b"%x\r\n%b\r\n" % (len(part), part))
        self.last = time.monotonic()
        return True


class Flow(FlowControl):
    """uvicorn's flow control, which does not resume reading while a connection is ``full``."""

    def __init__(self, transport: Any, connection: Any) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.full:
            super().resume_reading()


class WatchedConnection(_Connection):
    """A connection with this module's limits.  ``protocol`` combines it with one of uvicorn's classes.

    Invariant: the timer ``_late`` runs from the start of the connection, or from the first byte of a request, until
    the request's headers are complete.
    """

    header_seconds: float
    header_bytes: int
    room: int
    crowd: Crowd
    spare, since = False, 0.0

    @property
    def idle(self) -> int | None:
        """Return 0 without a request, 1 while a request's body is incomplete, and None while a request is served."""
        if self.cycle is None or (self.cycle.response_complete and not getattr(self, "pipeline", ())):
            return 0
        return 1 if self.cycle.more_body and not self.cycle.response_started else None

    @property
    def full(self) -> bool:
        """Return whether the client has sent as much ahead of an answer as it may."""
        waiting = getattr(self, "pipeline", ())
        return bool(waiting) and (len(waiting) > AHEAD or len(self.cycle.body) > AHEAD_BYTES)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        read_little(transport, READ)
        self.flow = Flow(transport, self)
        self.since = self.loop.time()
        self._come = 0  # number of bytes of a request's line and headers so far
        self._late = self.loop.call_later(self.header_seconds, self._close)
        self._answered: Any = None  # the request that is being answered; ``cycle`` is the newest request
        self._last: tuple[int, str] | None = None  # the last answer (status, text) of a connection that is ending
        self._dropped = 0  # bytes from the client that were dropped after the answer ``_last``
        self._half_closed = False  # whether the client has closed its sending side
        self._watching = False  # whether ``_watch_client`` is scheduled

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
            self._send_last()
        elif self._half_closed:
            self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        if self._is_spare():
            self._refuse(503, CROWDED)
            return
        super().handle_websocket_upgrade()

    def _is_spare(self) -> bool:
        """Return whether the connection is beyond ``room``, so that it serves monitoring requests only."""
        self.spare = self.spare and len(self.connections) > self.room
        return self.spare

    def _is_pending(self) -> bool:
        """Return whether an answer is not complete."""
        current = self._answered
        return bool(getattr(self, "pipeline", ())) or (current is not None and not current.response_complete)

    def data_received(self, data: bytes) -> None:
        if self._last is not None:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
            return
        busy = self.cycle is not None and not self.cycle.response_complete
        before = self.cycle
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # the connection has become a WebSocket
            self._stop()
            return
        if self._last is not None:
            return
        if getattr(self, "pipeline", ()) and not self.transport.is_closing():
            self.flow.resume_reading()  # has no effect while the connection is full
            if self.full:
                self._start_watching()
        if busy or self.cycle is not before:  # the data was a body, or completed the headers of a request
            self._come = 0
            self._stop()
            return
        self._come += len(data)
        if self._come > SLACK * self.header_bytes:
            self._refuse(*self._excess())
        elif self._late is None:
            self._late = self.loop.call_later(self.header_seconds, self._close)

    def eof_received(self) -> bool:
        """Handle the end of the client's sending side.  Return whether the connection stays open for pending answers.

        Only the reaction to sent data shows whether the client still reads.  So an interim answer or a comment is sent.
        """
        if self._last is not None or not self._is_pending() or self.transport.get_extra_info("sslcontext") is not None:
            return False
        if self.cycle.more_body and not self.cycle.response_complete:
            self._refuse(400, "the connection ended before the body was complete")
            return self._is_pending()
        self._half_closed = True
        self._stop()
        self._send_interim()
        self._start_watching()
        return True

    def _watch_client(self, seconds: float) -> None:
        """Check whether the client has left, and schedule the next check after twice ``seconds``.

        Reading does not show it: a full connection is not read, and a client that has closed its sending side may still
        read.  But the kernel of a client that has left rejects an interim answer or a comment, and the socket reports
        an error.
        RFC 9110 allows any number of interim answers.
        """
        self._watching = (self.full or self._half_closed) and not self.transport.is_closing()
        if not self._watching:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if seconds >= INTERIM:
            self._send_interim()
        seconds = min(2 * seconds, PROBES[1])
        self.loop.call_later(seconds, self._watch_client, seconds)

    def _start_watching(self) -> None:
        """Schedule the checks whether the client has left, unless they are scheduled."""
        if not self._watching:
            self._watching = True
            self.loop.call_later(PROBES[0], self._watch_client, PROBES[0])

    def _send_interim(self) -> None:
        """Send 100 Continue if the current answer has not begun and the client's version has interim answers, or a
        comment in a stream that has begun (``sse.EventStream``)."""
        current = self._answered
        state = current.scope["state"]
        if not current.response_started:
            if current.scope["http_version"] not in OLD:
                self.transport.write(CONTINUE)
        elif state.get("comment") and "direct" in state:
            state["direct"].write(state["comment"])

    def _excess(self) -> tuple[int, str]:
        """Return the status and the message for a request with too many bytes outside of its body."""
        return 431, BESIDE

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, NO_REQUEST)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error after all pending answers, and end the connection."""
        if self._last is not None or self.transport.is_closing():
            return
        self._last = status, message
        self._stop()
        cycle = self.cycle
        # the error is in the body of this request
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            if cycle is not self._answered:
                self.pipeline.popleft()
            elif cycle.response_started:
                self.transport.abort()
                return
            else:
                cycle.disconnected = True
                cycle.message_event.set()
                self._send_last()
                return
        if not self._is_pending():
            self._send_last()

    def _send_last(self) -> None:
        """Send the last answer, then drop what the client still sends until the connection closes."""
        assert self._last is not None
        self.transport.write(response(*self._last))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self._close)

    def _stop(self) -> None:
        """Stop the timer of a request's headers."""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()


class Unchunked:
    """Sends an answer without chunks, which HTTP/1.0 does not have.

    Without Content-Length, the end of the connection is the end of the body.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._open = False  # whether the answer has no Content-Length

    async def send(self, message: Any) -> None:
        """Send an ASGI message, with uvicorn's chunks turned off for an answer without a length."""
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
    """A connection for the parser httptools, which has no limits.

    This class limits all bytes of a request outside of its body: its line, headers, chunk sizes, chunk extensions and
    trailers.  Trailers are dropped.

    Invariant: ``_beside`` is the number of these bytes since the request began.  It may also include bytes of the
    previous request, up to the size of one read.
    """

    parser: Any
    url: bytes

    def connection_made(self, transport: Any) -> None:
        self._beside = 0
        self._in_head = True  # whether the headers are not complete
        self._data = b""  # the data that the parser is reading
        self.url = b""
        self._switching = False  # whether the request offers another protocol than a WebSocket
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        self._beside = 0
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer would add a header after the headers have been checked
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
        """Read a request that offers another protocol, such as HTTP/2, as a plain request.

        The parser has stopped after the headers.  A new parser gets the request line, the headers without the offer,
        and the rest of the data.
        """
        error = sys.exc_info()[1]
        rest = self._data[error.args[0] :] if error is not None else b""
        self._switching = False
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(501, "this server is not a proxy: CONNECT is not supported")
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

    def on_response_complete(self) -> None:
        self._answered.scope["state"].pop("direct", None)  # it refers to the request, which has the state
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            # twice the size, because the receive buffer may hold as many bytes of other data as of the body
            self._beside -= 2 * len(body)
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
        unsupported = unknown_coding(codings)
        if unsupported:
            self._refuse(501, unsupported)
        elif len(self.url) > self.header_bytes:  # the parser cannot split a URL of more than 64 KiB
            self._refuse(414, f"the URL has more than {self.header_bytes} bytes")
        else:
            self._refuse(*no_request(sys.exc_info()[1], self._data))


def unknown_coding(values: Iterable[str]) -> str:
    """Return an error message for values of Transfer-Encoding other than "chunked", or "" if there are none."""
    codings = [part.strip() for value in values for part in value.split(",")]
    for coding in codings:
        if coding.lower() != "chunked":
            return f"Transfer-Encoding: {printable(coding, 40)} is not supported; expected chunked alone"
    return ""


def no_request(error: BaseException | None, data: bytes) -> tuple[int, str]:
    """Return the status and the message for bytes that the parser rejects with ``error``."""
    why = f"{NO_REQUEST}: {error}" if error is not None and str(error) else NO_REQUEST
    if type(error).__name__ == "HttpParserCallbackError":
        why = f"{NO_REQUEST}: its URL cannot be read; expected a path such as /v1/models"
    if VERSION.match(data):
        return 505, "this version of HTTP is not supported: expected HTTP/1.1"
    method = data.split(b" ")[0]
    if (
        type(error).__name__ == "HttpParserInvalidMethodError"
        and METHOD.match(data)
        and method not in (b"GET", b"POST")
    ):
        return 501, f"the method {method.decode()} is not supported"
    return 400, why


def read_little(transport: Any, size: int) -> None:
    """Limit a transport to ``size`` bytes in one round of the event loop.

    asyncio reads 256 KiB, which may hold 40,000 tiny requests.
    """
    inner = getattr(transport, "_ssl_protocol", None)  # TLS passes on all decrypted data in one call
    if inner is not None and hasattr(inner, "_ssl_buffer_view"):
        inner.max_size, inner._ssl_buffer = size, bytearray(size)
        inner._ssl_buffer_view = memoryview(inner._ssl_buffer)
    transport.max_size = size


def protocol(seconds: float, header_bytes: int, room: int) -> type[Any]:
    """Return the class of connections, with httptools as the parser if it is installed.

    A request's headers must be complete after ``seconds``, and have at most ``header_bytes``.
    Connections beyond ``room`` are spare ones (see ``accepting``).
    """
    config = Config(_no_app, log_config=None)
    config.load()
    limits = {"header_seconds": seconds, "header_bytes": header_bytes, "room": room, "crowd": Crowd()}
    kind: Any = config.http_protocol_class
    return type("Connection", (Framed if hasattr(kind, "on_body") else WatchedConnection, kind), limits)
