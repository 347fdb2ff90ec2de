"""uvicorn's WebSocket connection with limits, so that departed, silent or hostile clients hold no resources."""

from __future__ import annotations

import codecs
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from minivllm.runtime.processes.confined import pieces
from minivllm.server.fair_queue import owner_of

from .body import HELD
from .connection import read_little

# number of bytes that are read in one round of the event loop; as empty frames they take tens of milliseconds
READ = 4 << 10
DROPPED = 256 << 10  # number of bytes that are read in one round once the data is dropped
PATIENCE = 3.0  # seconds for a close frame to be sent and answered
PIECES = 4096  # largest number of frames of one message
BAD_TEXT, LATE, TOO_BIG, FULL = 1007, 1008, 1009, 1013  # close codes (RFC 6455)
# uvicorn's server state -> address -> bytes of the messages that are being received from there
_HELD: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


class SocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket connection with limits on memory and time.

    Invariants: at most one message of the client is stored.  A client that does not read gets no more than fits into
    the connection's buffer.  On all its connections, an address has incomplete messages of at most ``HELD`` times the
    largest size.  A message must be complete after ``message_seconds``.
    """

    message_seconds = 30.0

    def __init__(self, config: Any, server_state: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, server_state, *args, **kwargs)
        self.close_timeout = PATIENCE
        self._held = _HELD.setdefault(server_state, Counter())
        self._fragments = 0  # number of bytes of the complete frames of an incomplete message
        # number of bytes of an incomplete message, including those of an incomplete frame, as counted in ``_held``
        self._kept = 0
        self._late: Any = None  # timer for an incomplete message
        self._failed = False  # whether the close frame with an error was sent; data that arrives is then dropped

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        read_little(transport, READ)
        self._owner = owner_of("", self.client)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hold(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._failed:
            # the data is read and dropped; otherwise the kernel would reset the connection, and the close frame would
            # be lost
            return
        super().data_received(data)
        if self.close_sent or self.transport.is_closing():
            self._hold(0)
            return
        self._hold(self._fragments + len(self.conn.reader.buffer) if self.handshake_complete else 0)
        if self._held[self._owner] > HELD * (self.config.ws_max_size or 0):
            self._refuse(FULL, "too many of your messages are being received")

    def _hold(self, size: int) -> None:
        """Record that ``size`` bytes of an incomplete message are held; 0 means that there is none.

        Start or stop the timer of the message.
        """
        self._held[self._owner] += size - self._kept
        self._kept = size
        if not self._held[self._owner]:
            del self._held[self._owner]  # a Counter reads a missing key as 0
        if size and self._late is None:
            self._late = self.loop.call_later(self.message_seconds, self._too_late)
        elif not size and self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        """End the connection because a message took too long."""
        self._late = None
        if self.read_paused:  # the delay is the server's, which does not read
            self._late = self.loop.call_later(self.message_seconds, self._too_late)
        elif not (self.close_sent or self.transport.is_closing()):
            self._refuse(LATE, f"a message was not complete after {self.message_seconds:g} s")

    def handle_text(self, event: Any) -> None:
        self._fragments = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Any) -> None:
        self._fragments = len(event.data)
        super().handle_bytes(event)

    def handle_ping(self) -> None:
        output = self.conn.data_to_send()
        if self.writable.is_set():  # otherwise pongs would fill the buffer of a client that does not read
            self.transport.write(b"".join(output))

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= PIECES:
            self._refuse(TOO_BIG, "too many fragments")
        elif not self.close_sent:
            self._fragments += len(event.data)
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._fragments = 0
        if self.curr_msg_data_type == "text" and not self.close_sent:
            decoder = codecs.getincrementaldecoder("utf-8")()
            try:
                for piece in pieces([self.frames]):
                    decoder.decode(piece)
                decoder.decode(b"", True)
            except UnicodeDecodeError:
                self._refuse(BAD_TEXT, "the text is not UTF-8")
                return
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.loop.call_later(PATIENCE, self.transport.abort)

    def handle_parser_exception(self) -> None:
        """Send a close frame with the reason, and drop data that arrives until the client has answered it."""
        close = self.conn.close_sent
        assert close is not None
        self._failed = True
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self._hold(0)
        read_little(self.transport, DROPPED)
        self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(PATIENCE, self.transport.close)

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            # Abort the connection if the client has not closed it by then.
            self.loop.call_later(PATIENCE + 1.0, self.transport.abort)

    def _refuse(self, code: int, reason: str) -> None:
        """End the connection with a close code and a reason."""
        self.frames: list[Any] = []
        self._fragments = 0
        self._hold(0)
        self.conn.fail(code, reason)
        self.handle_parser_exception()


def socket_protocol(seconds: float) -> type[SocketConnection]:
    """Return the class of WebSocket connections whose messages must be complete ``seconds`` after they began."""
    return type("Socket", (SocketConnection,), {"message_seconds": seconds})
