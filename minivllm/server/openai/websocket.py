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
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.websockets import WebSocket

from minivllm.runtime.processes.confined import encode_text
from minivllm.server import errors, logs
from minivllm.server.errors import ApiError, FlawedMessage
from minivllm.server.http.auth import ApiKeys
from minivllm.server.http.sse import supervise
from minivllm.validation import is_text

from . import JsonObject
from .bodies import ChatBody, CompletionBody
from .chat import Chat
from .completions import Completion
from .generate import Service, checked
from .limits import seconds_of
from .sockets import Socket, never

PATH = "/v1/ws"
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "chat.completions": (ChatBody, Chat),
    "completions": (CompletionBody, Completion),
}
LONGEST_ID = 128
ENDED_IDS = 1024  # number of ended ids that are kept; a cancel of an older id is an error


@dataclass
class SocketRequest:
    """A request whose final message is not in the outgoing queue yet.

    The work and the final message are two tasks, so that the second task reports the end of the first one even if the
    work is cancelled before it starts.
    """

    work: asyncio.Task[JsonObject]
    answer: asyncio.Task[None] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the work once.  A second cancellation would interrupt the cleanup of the first."""
        if not self.cancelled and not self.work.done():
            self.cancelled = True
            self.work.cancel()


class Connection(Socket):
    """One WebSocket.

    ``running`` has the ids whose final message is not in the outgoing queue yet.  ``ended`` has the latest ids whose
    final message is in the queue.
    """

    def __init__(self, socket: WebSocket, service: Service, keys: ApiKeys) -> None:
        super().__init__(socket, service, keys)
        self.running: dict[str, SocketRequest] = {}
        self.ended: dict[str, None] = {}  # ids of ended responses, the oldest first

    def refusal(self, error: ApiError) -> JsonObject:
        """Return the message about an error that belongs to no request."""
        return {"type": "error", "id": None, **error.body()}

    def text(self, message: JsonObject) -> str:
        """Return a message as text.  The whole answer of a final message is JSON already."""
        data = message.pop("data", None) if message["type"] == "done" else None
        text = super().text(message)
        return text if data is None else f'{text[:-1]},"data":{data}}}'

    async def end(self) -> None:
        """Stop all requests.

        The work of a request ends before its final message, because its log line is complete only after its resources
        are released.
        """
        running = list(self.running.values())
        for request in running:
            request.cancel()
        await asyncio.gather(*(request.work for request in running), return_exceptions=True)
        answers = [request.answer for request in running if request.answer is not None]
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def receive(self, raw: str) -> None:
        """Start or cancel the request of a message.  An error is sent as its final message, or without an id if the id
        is in use."""
        ident = None
        try:
            try:
                message = await self.service.bodies.parse(await encode_text(raw), self.owner, "body")
            except FlawedMessage as flawed:
                ident = self._id(flawed.message)  # the error has the id
                raise
            ident = self._id(message)
            self._take(message.get("type"), ident, message)
        except Exception as exc:
            error = self.error_of(exc)
            if ident in self.running:  # an error with this id would be the final message of the running request
                ident = None
            await self._queue_last({"type": "error", "id": ident, **error.body()})

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
            accepted = ", ".join((*KINDS, "cancel"))
            raise ApiError(400, f"type={errors.printable(str(kind), 40)!r}: expected one of {accepted}", "type")
        assert ident is not None
        unknown = next((key for key in message if key not in ("type", "id", "body")), None)
        if unknown:
            name = errors.printable(unknown, 40)
            raise ApiError(400, f"{name}: unknown field of a message; put the fields of a request into body", name)
        if kind == "cancel":
            self._cancel(ident)
            return
        if ident in self.running:
            raise ApiError(400, f"id={ident!r}: a request with this id is running; choose another id", "id")
        most = self.server.max_socket_requests
        if len(self.running) >= most:
            raise ApiError(
                429, (f"{most} requests run on this connection; expected at most {most}: wait until one has ended")
            )
        body = message.get("body")
        if not isinstance(body, dict):
            raise ApiError(400, "body: expected an object, as over HTTP", "body")
        state = self.new_state()
        request = self.running[ident] = SocketRequest(asyncio.create_task(self._work(kind, ident, body, state)))
        request.answer = asyncio.create_task(self._answer(kind, ident, request, state))

    def _cancel(self, ident: str) -> None:
        """Cancel a request.  ApiError (404) for an id that was never used."""
        request = self.running.get(ident)
        if request is not None:
            request.cancel()
        elif ident not in self.ended:
            raise ApiError(404, f"id={ident!r}: expected the id of a request that was sent on this connection", "id")

    async def _answer(self, kind: str, ident: str, request: SocketRequest, state: dict[str, Any]) -> None:
        """Wait for the end of a request's work, write the log line, queue the final message and free the id."""
        last: JsonObject = {"type": "done", "id": ident}
        log = state["log"]
        start = time.monotonic()
        try:
            await asyncio.wait({request.work})
            if not self.ending:
                last = self._final_message(ident, request, state)
        finally:
            if self.ending:
                log["gone"] = True
            status = last["error"]["code"] if last["type"] == "error" else 200
            ids = {"request_id": state["request_id"], "client_id": errors.printable(ident)}
            ms = round(1e3 * (time.monotonic() - start), 1)
            logs.event("request", **ids, path=PATH, kind=kind, status=status, ms=ms, **log)
        await self._queue_last(last)
        del self.running[ident]

    def _final_message(self, ident: str, request: SocketRequest, state: dict[str, Any]) -> JsonObject:
        """Return the final message of a request whose work has ended: done, cancelled or an error."""
        if request.cancelled and request.work.cancelled():
            state["log"]["cancelled"] = True
            return {"type": "done", "id": ident, "cancelled": True}
        try:
            return {"type": "done", "id": ident, **request.work.result()}
        # the client has not cancelled the request, so this is an internal failure
        except (Exception, asyncio.CancelledError) as exc:
            error = errors.of(exc)
            if error.status == 500:
                logs.log.error("request %s failed", state["request_id"], exc_info=exc)
            return {"type": "error", "id": ident, **error.body()}

    async def _queue_last(self, message: JsonObject) -> None:
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
        model, make_work = KINDS[kind]
        read = await checked(self.service, model, {"stream": True, **body}, self.owner)
        work = make_work(self.service, read, state)
        seconds = seconds_of(self.service, read.timeout_s)
        async with AsyncExitStack() as held:
            sending = self._send(work, held, bool(read.stream), ident)
            return await supervise(sending, never, self.service.door, seconds)

    async def _send(self, work: Any, held: AsyncExitStack, stream: bool, ident: str) -> JsonObject:
        """Queue the chunks of a stream, or return the whole answer as ``data``."""
        answer = await work.prepare(held)
        if not stream:
            found = [piece async for piece in answer.whole(work, self.owner)]
            return {"data": b"".join(found).decode()}  # a message cannot be sent in parts
        async for chunk in answer.chunks(work):
            await self.out.put({"type": "chunk", "id": ident, "data": chunk})
        return {}
