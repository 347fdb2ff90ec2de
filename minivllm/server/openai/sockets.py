"""One WebSocket of any protocol: its key, its bounded queue of outgoing messages, slow readers and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from minivllm.server import errors, logs
from minivllm.server.errors import ApiError
from minivllm.server.fair_queue import owner_of
from minivllm.server.http.auth import ApiKeys
from minivllm.server.http.body import parse_object

from . import JsonObject
from .generate import Service

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

PROTOCOL = "minivllm"  # the subprotocol that the server accepts
KEY = "key."  # prefix of a subprotocol that carries a key
WAITING = 64  # largest number of messages in the outgoing queue; requests wait while it is full
LONGEST_AUTH = 8192  # largest number of characters of the message with the key
BINARY, BAD_KEY, GOING, SLOW = 1003, 1008, 1012, 1013  # close codes (RFC 6455)


class Socket:
    """One WebSocket.  A subclass handles its messages (``receive``) and stops its requests (``end``)."""

    def __init__(self, socket: WebSocket, service: Service, keys: ApiKeys) -> None:
        self.socket, self.service, self.keys = socket, service, keys
        self.server: ServerConfig = service.server
        self.out: asyncio.Queue[Any] = asyncio.Queue(WAITING)
        self.state: dict[str, Any] = socket.scope["state"]
        self.tenant: str | None = None
        self.taken = 0  # requests so far
        self.ending = False

    async def begin(self) -> int | None:
        """Begin to serve an accepted connection.  Return a code to close it, or None."""
        return None

    async def receive(self, raw: str) -> None:
        """Handle a message of the client."""
        raise NotImplementedError

    async def end(self) -> None:
        """End all requests of the connection, and wait until they have released their resources."""
        raise NotImplementedError

    def refusal(self, error: ApiError) -> JsonObject:
        """Return the message about an error that belongs to no request."""
        raise NotImplementedError

    def text(self, message: Any) -> str:
        """Return a message of the outgoing queue as text."""
        return json.dumps(message, ensure_ascii=False, separators=(",", ":"))

    @property
    def owner(self) -> str:
        """Return the owner of the connection's requests in the queues of the server."""
        return owner_of(self.tenant or "", self.socket.scope.get("client"))

    def new_state(self) -> dict[str, Any]:
        """Return the state of the next request, with a separate id and log line."""
        self.taken += 1
        state = {**self.state, "tenant": self.tenant, "owner": self.owner, "log": {}}
        state["request_id"] = f"{self.state['request_id']}-{self.taken}"
        return state

    async def serve(self) -> None:
        """Serve the connection until the client leaves or is disconnected.  ApiError (401) for a wrong key."""
        offered = self.socket.scope.get("subprotocols") or []
        key = next((name.removeprefix(KEY) for name in offered if name.startswith(KEY)), None)
        headers = dict(self.socket.scope["headers"])
        if key is not None:
            headers[b"authorization"] = b"Bearer " + key.encode()
        self.tenant = self.keys.tenant(headers)
        if self.tenant is None and (key is not None or {b"authorization", b"x-api-key"} & headers.keys()):
            raise ApiError(401, "the API key is not valid", headers={"WWW-Authenticate": "Bearer"})
        await self.socket.accept(subprotocol=PROTOCOL if PROTOCOL in offered else None)
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read())
        door = self.service.door
        code = GOING
        try:
            watched: set[asyncio.Future[Any]] = {writer, reader, door.ended}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for side in (writer, reader):
                if side.done():
                    code = side.result()
        finally:
            self.ending = True
            await self._end(writer, reader)
            with contextlib.suppress(Exception):  # the socket may be closed already
                await asyncio.wait_for(self.socket.close(code), 1.0)
            self.state["log"]["closed"] = code

    async def _end(self, writer: asyncio.Task[int], reader: asyncio.Task[int]) -> None:
        """End the tasks of the connection."""
        writer.cancel()
        reader.cancel()
        await asyncio.gather(writer, reader, return_exceptions=True)
        await self.end()

    async def _write(self) -> int:
        """Send queued messages and return the close code, once the client does not receive them any more."""
        # before Python 3.12, ``wait_for`` loses a cancellation that arrives together with the result
        while not self.ending:
            text = self.text(await self.out.get())
            try:
                await asyncio.wait_for(self.socket.send_text(text), self.server.write_timeout)
            except asyncio.TimeoutError:
                return SLOW
            except (WebSocketDisconnect, RuntimeError):
                return 1000
        return GOING

    async def _read(self) -> int:
        """Handle the client's messages and return the close code, once there are no more."""
        if self.tenant is None and not await self._authenticate():
            return BAD_KEY
        refused = await self.begin()
        if refused is not None:
            return refused
        while not self.ending:
            try:
                raw = await self.socket.receive_text()
            except KeyError:
                return BINARY
            except (WebSocketDisconnect, RuntimeError):
                return 1000
            await self.receive(raw)
        return GOING

    async def _authenticate(self) -> bool:
        """Return whether the first message has a valid key.

        The client must send it within ``header_timeout``, the time limit for the headers of a request."""
        try:
            raw = await asyncio.wait_for(self.socket.receive_text(), self.server.header_timeout)
            message = parse_object(raw if len(raw) <= LONGEST_AUTH else "")
        except (asyncio.TimeoutError, WebSocketDisconnect, KeyError, RuntimeError, ApiError):
            return False
        key = message.get("key")
        if message.get("type") == "auth" and isinstance(key, str):
            self.tenant = self.keys.tenant({b"authorization": b"Bearer " + key.encode("utf-8", "replace")})
        if self.tenant is None:
            error = ApiError(401, 'expected {"type": "auth", "key": K} with a valid API key first')
            with contextlib.suppress(Exception):
                await self.socket.send_text(json.dumps(self.refusal(error)))
        return self.tenant is not None

    def error_of(self, exc: BaseException) -> ApiError:
        """Return the error for the client, and log an internal one."""
        error = errors.of(exc)
        if error.status == 500 and not isinstance(exc, ApiError):
            logs.log.error("socket %s failed on a message", self.state["request_id"], exc_info=exc)
        return error


async def never() -> Any:
    """Wait forever.  ``supervise`` waits for the client to leave, which ``serve`` already does for a WebSocket."""
    await asyncio.Event().wait()


def endpoint(
    get_service: Callable[[], Service | None], keys: ApiKeys, kind: type[Socket]
) -> Callable[[WebSocket], Any]:
    """Return the route of a kind of WebSocket.  It refuses the handshake until the engine is loaded."""

    async def serve(socket: WebSocket) -> None:
        service = get_service()
        if service is None or service.door.closed:
            await socket.close(GOING)
            return
        await kind(socket, service, keys).serve()

    return serve
