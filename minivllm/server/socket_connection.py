"""uvicorn's WebSocket connection, in which a client that is gone, silent or hostile holds nothing."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

PATIENCE = 3.0  # seconds for a close frame to be sent and answered
PIECES = 4096  # frames of one message
BAD_TEXT, TOO_BIG = 1007, 1009  # close codes (RFC 6455)


class SocketConnection(WebSocketsSansIOProtocol):
    """Invariant: of what a client sends, no more is kept than one message, and no more than the buffer of the
    connection is said to who does not read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = PATIENCE

    def handle_ping(self) -> None:
        output = self.conn.data_to_send()
        if self.writable.is_set():  # a flood of pings that reads no answer gets none
            self.transport.write(b"".join(output))

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= PIECES:
            self._refuse(TOO_BIG, "too many fragments")
        elif not self.close_sent:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
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

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            self.loop.call_later(PATIENCE + 1.0, self.transport.abort)  # which one that has closed does not feel

    def _refuse(self, code: int, reason: str) -> None:
        self.frames: list[Any] = []
        self.conn.fail(code, reason)
        self.handle_parser_exception()
