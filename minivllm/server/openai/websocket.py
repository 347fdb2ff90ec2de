"""``/v1/ws``: many requests at once on one WebSocket, told apart by ids of the client's.

    from the client   {"type": "auth", "key": K}                first, where a key is needed and no subprotocol had it
                      {"type": "chat.completions", "id": I, "body": {...}}       or "completions"; as over HTTP
                      {"type": "cancel", "id": I}
    to the client     {"type": "chunk", "id": I, "data": {...}}      what an event of the HTTP stream holds
                      {"type": "done", "id": I}                      its last word; "data" if stream is false
                      {"type": "error", "id": I, "error": {...}}     its last word too; no id: not about a request

An id that a client has used gets exactly one last word, in whatever order messages come, and is free after it.  An
error about a message whose id belongs to a running request is therefore sent without an id.  A cancel of an id that
has had its last word needs no answer; one of an id never used on this connection is an error, which is its last word.

A browser sets no headers, so a key may come as the subprotocol ``key.K``; a wrong one is refused at the handshake, and
so are pages of other origins (``guard.py``).  What waits to be sent is bounded: a reader who is slow slows its own
requests, one who takes nothing for ``write_timeout`` is sent away.  When the connection ends, for whatever reason, all
its requests do.
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

from .bodies import ChatBody, CompletionBody
from .chat import Chat
from .completions import Completion
from .generate import Service, checked, seconds_of

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

PATH = "/v1/ws"
PROTOCOL = "minivllm"  # the subprotocol that the server answers with
KEY = "key."  # what a subprotocol begins with that carries a key
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "chat.completions": (ChatBody, Chat),
    "completions": (CompletionBody, Completion),
}
WAITING = 64  # messages to a client that wait at most; then its requests do
LONGEST_ID = 128
LONGEST_AUTH = 8192  # characters of the message that brings the key
ENDED_IDS = 1024  # ids that are remembered to have had their last word; a cancel later than that is an error
BINARY, BAD_KEY, GOING, SLOW = 1003, 1008, 1012, 1013  # close codes (RFC 6455)


@dataclass
class _Asked:
    """A request whose last word is not in the queue yet.  The work and the last word are two tasks: however the work
    ends, even if it is cancelled before its first turn, the other one says so."""

    work: asyncio.Task[dict[str, Any]]
    answer: asyncio.Task[None] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Only once: a second cancellation would interrupt the cleanup that the first one began."""
        if not self.cancelled and not self.work.done():
            self.cancelled = True
            self.work.cancel()


class Connection:
    """One WebSocket.

    ``running`` has each id whose last word is not in the queue, ``ended`` the latest of those whose last word is.
    """

    def __init__(self, socket: WebSocket, service: Service, keys: ApiKeys) -> None:
        self.socket, self.service, self.keys = socket, service, keys
        self.server: ServerConfig = service.server
        self.running: dict[str, _Asked] = {}
        self.ended: dict[str, None] = {}  # in the order in which they ended
        self.out: asyncio.Queue[dict[str, Any]] = asyncio.Queue(WAITING)
        self.state: dict[str, Any] = socket.scope["state"]
        self.tenant: str | None = None
        self.taken, self.ending = 0, False

    @property
    def _who(self) -> str:
        return owner_of(self.tenant or "", self.socket.scope.get("client"))

    async def serve(self) -> None:
        """Until the client leaves or is sent away."""
        offered = self.socket.scope.get("subprotocols") or []
        key = next((one[len(KEY) :] for one in offered if one.startswith(KEY)), None)
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
            with contextlib.suppress(Exception):  # it may be closed already
                await asyncio.wait_for(self.socket.close(code), 1.0)
            self.state["log"]["closed"] = code

    async def _end_all(self, writer: asyncio.Task[int], reader: asyncio.Task[int]) -> None:
        """The works first: what they log of themselves is complete only when they have given everything back."""
        writer.cancel()
        reader.cancel()
        asked = list(self.running.values())
        for one in asked:
            one.cancel()
        await asyncio.gather(writer, reader, *(one.work for one in asked), return_exceptions=True)
        answers = [one.answer for one in asked if one.answer is not None]
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def _write(self) -> int:
        """Send what waits; the close code for a client that takes nothing."""
        while not self.ending:  # before Python 3.12, wait_for drops a cancellation that comes with its result
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
        """Take messages; the close code once that is over."""
        if self.tenant is None and not await self._let_in():
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
                message = await self.service.bodies.parse(raw.encode("utf-8", "surrogatepass"), self._who, "body")
                ident = self._id(message)  # before anything else is refused, so that its client hears of it
                check_text(raw, message)
                self._take(message.get("type"), ident, message)
            except Exception as exc:
                if not isinstance(exc, ApiError):
                    logs.log.error("socket %s failed on a message", self.state["request_id"], exc_info=exc)
                if ident in self.running:  # with its id this would be read as the last word of that request
                    ident = None
                await self._say_last({"type": "error", "id": ident, **errors.of(exc).body()})
        return GOING

    async def _let_in(self) -> bool:
        """The first message is the key; the client has as long for it as for the headers of a request."""
        try:
            raw = await asyncio.wait_for(self.socket.receive_text(), self.server.header_timeout)
            message = parse_object(raw if len(raw) <= LONGEST_AUTH else "")
        except (asyncio.TimeoutError, WebSocketDisconnect, KeyError, RuntimeError, ApiError):
            return False
        key = message.get("key")
        if message.get("type") == "auth" and isinstance(key, str):
            self.tenant = self.keys.tenant({b"authorization": b"Bearer " + key.encode("utf-8", "replace")})
        if self.tenant is None:
            error = ApiError(401, 'want {"type": "auth", "key": K} with a valid API key first')
            with contextlib.suppress(Exception):
                await self.socket.send_text(json.dumps({"type": "error", "id": None, **error.body()}))
        return self.tenant is not None

    def _id(self, message: dict[str, Any]) -> str | None:
        ident = message.get("id")
        if ident is None and message.get("type") == "auth":
            return None
        if not isinstance(ident, str) or not 0 < len(ident) <= LONGEST_ID or not is_text(ident):
            raise ApiError(400, f"id: want a text of 1 to {LONGEST_ID} characters", "id")
        return ident

    def _take(self, kind: Any, ident: str | None, message: dict[str, Any]) -> None:
        """Start or cancel a request.  ApiError for what cannot be."""
        if kind == "auth":
            return
        if not isinstance(kind, str) or kind not in (*KINDS, "cancel"):
            wanted = ", ".join((*KINDS, "cancel"))
            raise ApiError(400, f"type={errors.printable(str(kind), 40)!r}: want one of {wanted}", "type")
        assert ident is not None
        if unknown := next((key for key in message if key not in ("type", "id", "body")), None):
            name = errors.printable(unknown, 40)
            raise ApiError(400, f"{name}: unknown field of a message; fields of a request are those of body", name)
        if kind == "cancel":
            self._cancel(ident)
            return
        if ident in self.running:
            raise ApiError(400, f"id={ident!r}: a request with this id is running", "id")
        most = self.server.max_socket_requests
        if len(self.running) >= most:
            raise ApiError(429, f"{most} requests run on this connection; want at most {most}")
        body = message.get("body")
        if not isinstance(body, dict):
            raise ApiError(400, "body: want an object, as over HTTP", "body")
        self.taken += 1
        state = {**self.state, "tenant": self.tenant, "owner": self._who, "log": {}}
        state["request_id"] = f"{self.state['request_id']}-{self.taken}"
        asked = self.running[ident] = _Asked(asyncio.create_task(self._work(kind, ident, body, state)))
        asked.answer = asyncio.create_task(self._answer(kind, ident, asked, state))

    def _cancel(self, ident: str) -> None:
        """ApiError for an id that was never used."""
        if (asked := self.running.get(ident)) is not None:
            asked.cancel()
        elif ident not in self.ended:
            raise ApiError(404, f"id={ident!r}: want the id of a request that was sent on this connection", "id")

    async def _answer(self, kind: str, ident: str, asked: _Asked, state: dict[str, Any]) -> None:
        """The last word of a request, once its work has ended; then its id is free."""
        last: dict[str, Any] = {"type": "done", "id": ident}
        start, log = time.monotonic(), state["log"]
        try:
            await asyncio.wait({asked.work})
            if not self.ending:
                last = self._last_word(ident, asked, state)
        finally:
            if self.ending:
                log["gone"] = True
            status = last["error"]["code"] if last["type"] == "error" else 200
            logs.event(
                "request",
                request_id=state["request_id"],
                client_id=errors.printable(ident),
                path=PATH,
                kind=kind,
                status=status,
                ms=round(1e3 * (time.monotonic() - start), 1),
                **log,
            )
        await self._say_last(last)
        del self.running[ident]

    def _last_word(self, ident: str, asked: _Asked, state: dict[str, Any]) -> dict[str, Any]:
        if asked.cancelled and asked.work.cancelled():
            state["log"]["cancelled"] = True
            return {"type": "done", "id": ident, "cancelled": True}
        try:
            return {"type": "done", "id": ident, **asked.work.result()}
        except (Exception, asyncio.CancelledError) as exc:  # cancelled by nobody: something failed inside
            error = errors.of(exc)
            if error.status == 500:
                logs.log.error("request %s failed", state["request_id"], exc_info=exc)
            return {"type": "error", "id": ident, **error.body()}

    async def _say_last(self, message: dict[str, Any]) -> None:
        """Send the last word of an id, or an error without one.  Nothing else runs between the moment in which the
        queue has it and the return, so a client that has read it finds the id free."""
        await self.out.put(message)
        if (ident := message["id"]) is not None:
            self.ended.pop(ident, None)
            self.ended[ident] = None
            if len(self.ended) > ENDED_IDS:
                del self.ended[next(iter(self.ended))]

    async def _work(self, kind: str, ident: str, body: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """What the last word has to say beside that it is the last."""
        model, asked = KINDS[kind]
        read = await checked(self.service, model, {"stream": True, **body}, self._who)
        work = asked(self.service, read, state)
        seconds = seconds_of(self.service, read.timeout_s)
        async with AsyncExitStack() as held:
            return await supervise(self._send(work, held, bool(read.stream), ident), _never, self.service.door, seconds)

    async def _send(self, work: Any, held: AsyncExitStack, stream: bool, ident: str) -> dict[str, Any]:
        answer = await work.prepare(held)
        if not stream:
            found = [piece async for piece in answer.whole(work, self._who)]
            return {"data": b"".join(found).decode()}  # a message is sent in one piece
        async for chunk in answer.chunks(work):
            await self.out.put({"type": "chunk", "id": ident, "data": chunk})
        return {}


async def _never() -> Any:
    """A client that does not leave: that is watched elsewhere."""
    await asyncio.Event().wait()


def endpoint(get_service: Callable[[], Service | None], keys: ApiKeys) -> Callable[[WebSocket], Any]:
    """The route.  Before the engine is there the handshake is refused."""

    async def serve(socket: WebSocket) -> None:
        service = get_service()
        if service is None or service.door.closed:
            await socket.close(GOING)
            return
        await Connection(socket, service, keys).serve()

    return serve
