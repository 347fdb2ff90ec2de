"""uvicorn's WebSocket connection, in which a client that is gone, silent or hostile holds nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from minivllm.server.fair_queue import owner_of

from .body import HELD
from .connection import read_little

READ = 4 << 10  # bytes that are read in one turn of the event loop: of frames without a text tens of milliseconds
DROPPED = 256 << 10  # bytes, once nothing is done with them
PATIENCE = 3.0  # seconds for a close frame to be sent and answered
PIECES = 4096  # frames of one message
BAD_TEXT, LATE, TOO_BIG, FULL = 1007, 1008, 1009, 1013  # close codes (RFC 6455)
_HELD: WeakKeyDictionary[Any, Counter[str]] = (
    WeakKeyDictionary()
)  # of a server: bytes of messages on their way, by whom


class SocketConnection(WebSocketsSansIOProtocol):
    """Invariant: of what a client sends, no more is kept than one message, and no more than the buffer of the
    connection is said to who does not read.  Of messages that are not whole yet an address has ``HELD`` of the largest
    size at most, on all its connections, and ``message_seconds`` for each."""

    message_seconds = 30.0

    def __init__(self, config: Any, server_state: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, server_state, *args, **kwargs)
        self.close_timeout = PATIENCE
        self._held = _HELD.setdefault(server_state, Counter())
        self._fragments = self._kept = (
            0  # bytes of the frames that have come of a message; of these and of half a frame
        )
        self._late: Any = None
        self._failed = False  # the connection ends with what was sent: what comes is dropped

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        read_little(transport, READ)
        self._who = owner_of("", self.client)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hold(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._failed:
            return  # what is left unread would reset the connection, and nobody would hear why it ends
        super().data_received(data)
        if self.close_sent or self.transport.is_closing():
            self._hold(0)
            return
        self._hold(self._fragments + len(self.conn.reader.buffer) if self.handshake_complete else 0)
        if self._held[self._who] > HELD * (self.config.ws_max_size or 0):
            self._refuse(FULL, "too many of your messages are on their way")

    def _hold(self, size: int) -> None:
        """So many bytes are kept of a message that is not whole."""
        self._held[self._who] += size - self._kept
        self._kept = size
        if not self._held[self._who]:
            del self._held[self._who]  # which reads as 0
        if size and self._late is None:
            self._late = self.loop.call_later(self.message_seconds, self._too_late)
        elif not size and self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self.read_paused:  # it is we who do not read
            self._late = self.loop.call_later(self.message_seconds, self._too_late)
        elif not (self.close_sent or self.transport.is_closing()):
            self._refuse(LATE, f"a message did not come within {self.message_seconds:g} s")

    def handle_text(self, event: Any) -> None:
        self._fragments = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Any) -> None:
        self._fragments = len(event.data)
        super().handle_bytes(event)

    def handle_ping(self) -> None:
        output = self.conn.data_to_send()
        if self.writable.is_set():  # a flood of pings that reads no answer gets none
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
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self._refuse(BAD_TEXT, "a text that is not UTF-8")
                return
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.loop.call_later(PATIENCE, self.transport.abort)

    def handle_parser_exception(self) -> None:
        """Say why the connection ends, and drop what still comes until the client has heard of it."""
        assert self.conn.close_sent is not None
        told, self._failed, self.close_sent = self.conn.close_sent, True, True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": told.code, "reason": told.reason})
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
            self.loop.call_later(PATIENCE + 1.0, self.transport.abort)  # which one that has closed does not feel

    def _refuse(self, code: int, reason: str) -> None:
        self.frames: list[Any] = []
        self._fragments = 0
        self._hold(0)
        self.conn.fail(code, reason)
        self.handle_parser_exception()


def socket_protocol(seconds: float) -> type[SocketConnection]:
    """The class of connections whose messages must have come ``seconds`` after they began."""
    return type("Socket", (SocketConnection,), {"message_seconds": seconds})
