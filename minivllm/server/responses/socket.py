"""The WebSocket ``/v1/responses``: many responses on one connection, with the events of a stream.

    from the client   {"type": "response.create", ...}         the fields of a body; stream_id: a logical stream
                                                               generate: false makes a response without an answer
    to the client     the events of the response               with its stream_id, if it has one
                      {"type": "error", "status", "error"}     the response could not begin

The responses with the same stream_id are generated one after another, those with different ones at the same time.  A
later response can continue an earlier one of the connection even if it is not stored.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from starlette.websockets import WebSocket

from minivllm.errors import shown
from minivllm.runtime.processes.confined import encode_text
from minivllm.server import errors, logs
from minivllm.server.errors import ApiError
from minivllm.server.http.auth import ApiKeys
from minivllm.server.http.sse import dump, supervise
from minivllm.server.openai import JsonObject
from minivllm.server.openai.bodies import ResponsesBody
from minivllm.server.openai.generate import Service, checked
from minivllm.server.openai.limits import seconds_of
from minivllm.server.openai.sockets import Socket, never
from minivllm.server.response_store import KeyResponses

from .history import History, LocalStore
from .routes import make_work
from .work import ResponseWork

PATH = "/v1/responses"
CREATE = "response.create"
LONGEST_STREAM_ID = 128  # largest number of characters of a stream_id
MOST_LOCAL = 64  # largest number of responses that a connection keeps


class ResponsesSocket(Socket):
    """A WebSocket connection on which a client requests answers as events of OpenAI's Responses API."""

    def __init__(self, socket: WebSocket, service: Service, keys: ApiKeys) -> None:
        super().__init__(socket, service, keys)
        # task of a response -> its stream_id, in the order of requests
        self.running: dict[asyncio.Task[None], str] = {}
        self._local: LocalStore | None = None

    def refusal(self, error: ApiError, stream_id: str = "") -> JsonObject:
        """Return the event about an error that belongs to no response."""
        event = {"type": "error", "status": error.status, **error.body()}
        return {**event, "stream_id": stream_id} if stream_id else event

    def text(self, message: bytes) -> str:
        """Return an event as text."""
        return message.decode()

    async def end(self) -> None:
        """Stop all responses, and drop those that are stored for the connection."""
        tasks = list(self.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._local is not None:
            self._local.close()
            self._local = None

    def local(self, identity: str) -> LocalStore:
        """Return the responses of the connection, whose key has the given identity."""
        if self._local is None:
            of_keys = self.service.socket_responses
            of_key = of_keys.get(identity) or KeyResponses(2 * self.server.max_body_bytes)
            of_keys[identity] = of_key
            self._local = LocalStore(MOST_LOCAL, of_key)
        return self._local

    async def receive(self, raw: str) -> None:
        """Start the response that a message requests.  A malformed message, or one above the limit of responses, gets
        an error event."""
        stream_id = ""
        try:
            message = await self.service.bodies.parse(await encode_text(raw), self.owner)
            stream_id = _stream_of(message)
            kind = message.pop("type", None)
            if kind != CREATE:
                raise ApiError(400, f"type={shown(kind)}: expected {CREATE}", "type")
            most = self.server.max_socket_requests
            if len(self.running) >= most:
                raise ApiError(
                    429, (f"{most} responses run on this connection; expected at most {most}: wait until one has ended")
                )
        except Exception as exc:
            await self.out.put(dump(self.refusal(self.error_of(exc), stream_id)))
            return
        before = [task for task, other in self.running.items() if other == stream_id]
        task = asyncio.create_task(self._serve(message, stream_id, before[-1:]))
        self.running[task] = stream_id
        task.add_done_callback(self.running.pop)

    async def _serve(self, body: JsonObject, stream_id: str, before: list[asyncio.Task[None]]) -> None:
        """Send the events of a response after the previous response of the same stream id, and write the log line."""
        state = self.new_state()
        state["identity"] = self.keys.identity(self.tenant or "")
        start = time.monotonic()
        status = 499
        try:
            if before:
                await asyncio.wait(before)
            status = await self._send(body, stream_id, state)
        finally:
            ms = round(1e3 * (time.monotonic() - start), 1)
            ids = {"request_id": state["request_id"]}
            logs.event("request", **ids, path=PATH, kind=CREATE, status=status, ms=ms, **state["log"])

    async def _send(self, body: JsonObject, stream_id: str, state: dict[str, Any]) -> int:
        """Queue the events of a response, or of an error, and return its status for the log."""
        work: ResponseWork | None = None
        generate = body.pop("generate", None)
        try:
            if generate not in (None, True, False):
                raise ApiError(400, f"generate={shown(generate)}: expected true or false", "generate")
            checked_body = await checked(self.service, ResponsesBody, {**body, "stream": True}, self.owner)
            if checked_body.background:
                raise ApiError(400, "background: expected false on a WebSocket", "background")
            history = History(self.service, state["identity"], self.owner, self.local(state["identity"]))
            work = await make_work(self.service, checked_body, state, history)
            seconds = seconds_of(self.service, work.body.timeout_s)
            sending = self._generate(work, stream_id, generate is not False)
            await supervise(sending, never, self.service.door, seconds)
        except Exception as exc:
            error = errors.of(exc)
            if error.status == 500 and not isinstance(exc, ApiError):
                logs.log.error("request %s failed", state["request_id"], exc_info=exc)
            if work is None or not work.output.sequence:
                await self.out.put(dump(self.refusal(error, stream_id)))
                return error.status
            state["log"]["error"] = error.status
            for event in work.failure(error):
                await self.out.put(_with_stream_id(dump(event), stream_id))
        return 200

    async def _generate(self, work: ResponseWork, stream_id: str, generate: bool) -> None:
        """Queue the events of a response while it is generated.  With ``generate`` false, the response has no answer,
        and only keeps its input for a later request."""
        async with AsyncExitStack() as held:
            if generate:
                events = work.json_events(await work.prepare(held))
            else:
                events = work.idle_events()
            async for _, data in events:
                await self.out.put(_with_stream_id(data, stream_id))


def _stream_of(message: JsonObject) -> str:
    """Remove the field ``stream_id`` from a message and return it, or "" without one.

    ApiError (400) for a malformed stream_id.
    """
    stream_id = message.pop("stream_id", None)
    if stream_id is None:
        return ""
    if not isinstance(stream_id, str) or not 0 < len(stream_id) <= LONGEST_STREAM_ID:
        raise ApiError(400, f"stream_id: expected a text of 1 to {LONGEST_STREAM_ID} characters", "stream_id")
    return stream_id


def _with_stream_id(event: bytes, stream_id: str) -> bytes:
    """Return the JSON of an event with its stream id, if it has one."""
    return event[:-1] + b',"stream_id":' + dump(stream_id) + b"}" if stream_id else event
