"""``/v1/ws``: many concurrent requests on one WebSocket, identified by ids that the client chooses.

    from the client   {"type": "auth", "key": K}                first, if a key is needed and no subprotocol has it
                      {"type": "chat.completions", "id": I, "body": {...}}       or "completions"; as over HTTP
                      {"type": "cancel", "id": I}
    to the client     {"type": "chunk", "id": I, "data": {...}}      the data of an event of the HTTP stream
                      {"type": "done", "id": I}                      final message; "data" if stream is false
                      {"type": "error", "id": I, "error": {...}}     final message; without id: not about a request

Each id gets exactly one final message, in whatever order messages arrive, and can be used again after it.  An error
about a message whose id belongs to a running request is therefore sent without an id.  A cancel of an id whose final
message is sent has no answer.  A cancel of an id that was never used on this connection gets an error as its final
message.

A browser cannot set headers, so a key may be sent as the subprotocol ``key.K``.  The handshake is refused for a wrong
key, and for pages of other origins (``guard.py``).  The queue of outgoing messages is bounded: a slow client slows only
its own requests, and a client that receives nothing for ``write_timeout`` is disconnected.  When a connection ends, all
its requests end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from minivllm.server import errors, logs
from minivllm.server.errors import ApiError
from minivllm.server.fair_queue import owner_of
from minivllm.server.http.auth import ApiKeys
from minivllm.server.http.body import check_text, parse_object
from minivllm.server.http.sse import supervise
from minivllm.validation import is_text

from . import JsonObject
from .bodies import ChatBody, CompletionBody
from .chat import Chat
from .completions import Completion
from .generate import Service, checked
from .limits import seconds_of

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

PATH = "/v1/ws"
PROTOCOL = "minivllm"  # the subprotocol that the server accepts
KEY = "key."  # prefix of a subprotocol that carries a key
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "chat.completions": (ChatBody, Chat),
    "completions": (CompletionBody, Completion),
}
WAITING = 64  # most messages in the outgoing queue; requests wait while it is full
LONGEST_ID = 128
LONGEST_AUTH = 8192  # most characters of the message with the key
ENDED_IDS = 1024  # ended ids that are remembered; a cancel of an older id is an error
BINARY, BAD_KEY, GOING, SLOW = 1003, 1008, 1012, 1013  # close codes (RFC 6455)


@dataclass
class _Asked:
    """A request whose final message is not in the outgoing queue yet.

    The work and the final message are two tasks, so the second task reports the end of the first, even if the work is
    cancelled before it has started."""

    work: asyncio.Task[JsonObject]
    answer: asyncio.Task[None] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the work once.  A second cancellation would interrupt the cleanup of the first."""
        if not self.cancelled and not self.work.done():
            self.cancelled = True
            self.work.cancel()


class Connection:
    """One WebSocket.

    ``running`` has the ids whose final message is not in the outgoing queue, ``ended`` the latest ids whose final
    message is."""

    def __init__(self, socket: WebSocket, service: Service, keys: ApiKeys) -> None:
        self.socket, self.service, self.keys = socket, service, keys
        self.server: ServerConfig = service.server
        self.running: dict[str, _Asked] = {}
        self.ended: dict[str, None] = {}  # in the order of their ends
        self.out: asyncio.Queue[JsonObject] = asyncio.Queue(WAITING)
        self.state: dict[str, Any] = socket.scope["state"]
        self.tenant: str | None = None
        self.taken = 0  # requests so far
        self.ending = False

    @property
    def _owner(self) -> str:
        """Return the owner of the connection's requests in the queues of the server."""
        return owner_of(self.tenant or "", self.socket.scope.get("client"))

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
        writer, reader = asyncio.create_task(self._write()), asyncio.create_task(self._read())
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
            await self._end_all(writer, reader)
            with contextlib.suppress(Exception):  # the socket may be closed already
                await asyncio.wait_for(self.socket.close(code), 1.0)
            self.state["log"]["closed"] = code

    async def _end_all(self, writer: asyncio.Task[int], reader: asyncio.Task[int]) -> None:
        """Cancel all tasks of the connection.

        The work of requests ends before their final messages, because its log line is complete only after it has
        released its resources."""
        writer.cancel()
        reader.cancel()
        running = list(self.running.values())
        for asked in running:
            asked.cancel()
        await asyncio.gather(writer, reader, *(asked.work for asked in running), return_exceptions=True)
        answers = [asked.answer for asked in running if asked.answer is not None]
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def _write(self) -> int:
        """Send queued messages and return the close code, once the client does not receive them any more."""
        while not self.ending:  # before Python 3.12, wait_for loses a cancellation that arrives with its result
            message = await self.out.get()
            data = message.pop("data", None) if message["type"] == "done" else None
            text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
            if data is not None:
                text = f'{text[:-1]},"data":{data}}}'
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
        while not self.ending:
            try:
                raw = await self.socket.receive_text()
            except KeyError:
                return BINARY
            except (WebSocketDisconnect, RuntimeError):
                return 1000
            ident = None
            try:
                message = await self.service.bodies.parse(raw.encode("utf-8", "surrogatepass"), self._owner, "body")
                ident = self._id(message)  # first, so that later errors have the id
                check_text(raw, message)
                self._take(message.get("type"), ident, message)
            except Exception as exc:
                if not isinstance(exc, ApiError):
                    logs.log.error("socket %s failed on a message", self.state["request_id"], exc_info=exc)
                if ident in self.running:  # with the id, the error would be the final message of that request
                    ident = None
                await self._say_last({"type": "error", "id": ident, **errors.of(exc).body()})
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
                await self.socket.send_text(json.dumps({"type": "error", "id": None, **error.body()}))
        return self.tenant is not None

    def _id(self, message: JsonObject) -> str | None:
        """Return the id of a message, or None for the message with the key.  ApiError for a malformed id."""
        ident = message.get("id")
        if ident is None and message.get("type") == "auth":
            return None
        if not isinstance(ident, str) or not 0 < len(ident) <= LONGEST_ID or not is_text(ident):
            raise ApiError(400, f"id: expected a text of 1 to {LONGEST_ID} characters", "id")
        return ident

    def _take(self, kind: Any, ident: str | None, message: JsonObject) -> None:
        """Start or cancel the request of a message.  ApiError if the message is malformed or the id is in use."""
        if kind == "auth":
            return
        if not isinstance(kind, str) or kind not in (*KINDS, "cancel"):
            known = ", ".join((*KINDS, "cancel"))
            raise ApiError(400, f"type={errors.printable(str(kind), 40)!r}: expected one of {known}", "type")
        assert ident is not None
        unknown = next((key for key in message if key not in ("type", "id", "body")), None)
        if unknown:
            name = errors.printable(unknown, 40)
            raise ApiError(400, f"{name}: unknown field of a message; put the fields of a request into body", name)
        if kind == "cancel":
            self._cancel(ident)
            return
        if ident in self.running:
            raise ApiError(400, f"id={ident!r}: a request with this id is running", "id")
        most = self.server.max_socket_requests
        if len(self.running) >= most:
            raise ApiError(429, f"{most} requests run on this connection; expected at most {most}")
        body = message.get("body")
        if not isinstance(body, dict):
            raise ApiError(400, "body: expected an object, as over HTTP", "body")
        self.taken += 1
        state = {**self.state, "tenant": self.tenant, "owner": self._owner, "log": {}}
        state["request_id"] = f"{self.state['request_id']}-{self.taken}"
        asked = self.running[ident] = _Asked(asyncio.create_task(self._work(kind, ident, body, state)))
        asked.answer = asyncio.create_task(self._answer(kind, ident, asked, state))

    def _cancel(self, ident: str) -> None:
        """Cancel a request.  ApiError (404) for an id that was never used."""
        asked = self.running.get(ident)
        if asked is not None:
            asked.cancel()
        elif ident not in self.ended:
            raise ApiError(404, f"id={ident!r}: expected the id of a request that was sent on this connection", "id")

    async def _answer(self, kind: str, ident: str, asked: _Asked, state: dict[str, Any]) -> None:
        """Wait for the end of a request's work, write the log line, queue the final message and free the id."""
        last: JsonObject = {"type": "done", "id": ident}
        log = state["log"]
        start = time.monotonic()
        try:
            await asyncio.wait({asked.work})
            if not self.ending:
                last = self._final_message(ident, asked, state)
        finally:
            if self.ending:
                log["gone"] = True
            status = last["error"]["code"] if last["type"] == "error" else 200
            ids = {"request_id": state["request_id"], "client_id": errors.printable(ident)}
            ms = round(1e3 * (time.monotonic() - start), 1)
            logs.event("request", **ids, path=PATH, kind=kind, status=status, ms=ms, **log)
        await self._say_last(last)
        del self.running[ident]

    def _final_message(self, ident: str, asked: _Asked, state: dict[str, Any]) -> JsonObject:
        """Return the final message of a request whose work has ended."""
        if asked.cancelled and asked.work.cancelled():
            state["log"]["cancelled"] = True
            return {"type": "done", "id": ident, "cancelled": True}
        try:
            return {"type": "done", "id": ident, **asked.work.result()}
        except (Exception, asyncio.CancelledError) as exc:  # the client has not cancelled: an internal failure
            error = errors.of(exc)
            if error.status == 500:
                logs.log.error("request %s failed", state["request_id"], exc_info=exc)
            return {"type": "error", "id": ident, **error.body()}

    async def _say_last(self, message: JsonObject) -> None:
        """Queue the final message of an id, or an error without an id.

        No other task runs between the queueing and the return, so the id is free when the client reads the message."""
        await self.out.put(message)
        ident = message["id"]
        if ident is not None:
            self.ended.pop(ident, None)
            self.ended[ident] = None
            if len(self.ended) > ENDED_IDS:
                del self.ended[next(iter(self.ended))]

    async def _work(self, kind: str, ident: str, body: JsonObject, state: dict[str, Any]) -> JsonObject:
        """Run a request and return the further members of its final message."""
        model, asked = KINDS[kind]
        read = await checked(self.service, model, {"stream": True, **body}, self._owner)
        work = asked(self.service, read, state)
        seconds = seconds_of(self.service, read.timeout_s)
        async with AsyncExitStack() as held:
            sending = self._send(work, held, bool(read.stream), ident)
            return await supervise(sending, _never, self.service.door, seconds)

    async def _send(self, work: Any, held: AsyncExitStack, stream: bool, ident: str) -> JsonObject:
        """Queue the chunks of a stream, or return the whole answer as ``data``."""
        answer = await work.prepare(held)
        if not stream:
            found = [piece async for piece in answer.whole(work, self._owner)]
            return {"data": b"".join(found).decode()}  # a message cannot be sent in parts
        async for chunk in answer.chunks(work):
            await self.out.put({"type": "chunk", "id": ident, "data": chunk})
        return {}


async def _never() -> Any:
    """Wait forever.  ``supervise`` waits for the client to leave, which ``serve`` already does for a WebSocket."""
    await asyncio.Event().wait()


def endpoint(get_service: Callable[[], Service | None], keys: ApiKeys) -> Callable[[WebSocket], Any]:
    """Return the route.  It refuses the handshake until the engine is loaded."""

    async def serve(socket: WebSocket) -> None:
        service = get_service()
        if service is None or service.door.closed:
            await socket.close(GOING)
            return
        await Connection(socket, service, keys).serve()

    return serve
