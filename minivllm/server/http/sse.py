"""Event streams and the supervision of every answer.

An answer ends early if its client leaves or reads nothing, if it takes too long, or if the server shuts down.
Its work runs in a task of its own.  A second task waits for the client to leave.  At the end, for whatever reason, both
tasks are cancelled and everything that the request holds is released.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.responses import Response

from minivllm.server import errors, logs
from minivllm.server.errors import ApiError

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

    from .connection import Direct
    from .limits import Door

TICK = 1.0  # seconds between checks of the time limits
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]  # fmt: skip


class Gone(Exception):
    """Error of an answer whose client has left or does not read it."""


def dump(value: Any) -> bytes:
    """Return a value as compact JSON.  Half of a surrogate pair, which UTF-8 cannot hold, becomes "?"."""
    try:
        # pydantic's to_json is six times as fast as the json module, which matters for a chunk per token
        return to_json(value)
    except ValueError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encode(event: Any) -> bytes:
    """Return a value as a server-sent event."""
    return b"data: " + dump(event) + b"\n\n"


def framed(kind: str, data: bytes) -> bytes:
    """Return JSON as a server-sent event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def encode_typed(event: Mapping[str, Any]) -> bytes:
    """Return an event as a server-sent event with the name of its ``type``."""
    return framed(event["type"], dump(event))


async def supervise(
    work: Coroutine[Any, Any, Any],
    receive: Any,
    door: Door,
    seconds: float,
    look: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Any:
    """Run ``work`` and return its result.

    Raise Gone if the client leaves first, and ApiError if the work takes longer than ``seconds`` (408) or the server
    shuts down (503).  ``look`` is called about every second, and an exception that it raises ends the work too.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    end = time.monotonic() + seconds
    try:
        while True:
            remaining = end - time.monotonic()
            timeout = max(min(remaining, TICK), 0)
            await asyncio.wait({task, gone, door.ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise Gone
            if door.ended.done():
                raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
            if remaining <= 0:
                raise ApiError(408, f"the answer took longer than {seconds:g} s; lower max_tokens, or allow more time")
            if look is not None:
                await look()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Any) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An ASGI response that sends ``events`` (bytes) as they arrive.

    ``held`` is closed when the response ends, in every case.  The status line is sent with the first event, or after a
    second.  An error before that is answered with its own status.  Once the response has begun, ``events`` may also
    write to the connection directly (``connection.Direct``).
    """

    head = HEADERS
    comment = b": keep-alive\n\n"  # sent while there are no events

    def __init__(
        self,
        events: AsyncIterator[bytes],
        held: AsyncExitStack,
        door: Door,
        server: ServerConfig,
        seconds: float,
        more: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.more = [(name.lower().encode(), value.encode()) for name, value in (more or {}).items()]
        self.events = events
        self.held = held
        self.door = door
        self.server = server
        self.seconds = seconds
        self._sent = time.monotonic()  # time at which the last event was sent, or began to be sent
        self._writing = False  # whether an event is being sent
        self._started = False  # whether the status line has been sent
        self._direct: Direct | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._direct = scope["state"].get("direct")
        scope["state"]["comment"] = self.comment
        async with self.held:
            last = b""
            try:
                await supervise(self._write(send), receive, self.door, self.seconds, lambda: self._look(send))
            except Gone:
                scope["state"]["log"]["gone"] = True
                if not self._started:
                    # the client has left, so the status 499 is for the log only
                    await Response(status_code=499)(scope, receive, send)
                return
            except Exception as exc:
                error = errors.of(exc)
                if error.status == 500:
                    logs.log.error("request %s failed", scope["state"]["request_id"], exc_info=exc)
                if not self._started:
                    raise error from exc
                scope["state"]["log"]["error"] = error.status
                last = self._final(error)
            await self._start(send)
            await send({"type": "http.response.body", "body": last})

    async def _start(self, send: Any) -> None:
        """Send the status line and the headers, unless that was done."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": [*self.head, *self.more]})

    async def _write(self, send: Any) -> None:
        """Send all events."""
        async for event in self.events:
            await self._start(send)
            self._writing = True
            self._sent = time.monotonic()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._writing = False
            self._sent = time.monotonic()

    async def _look(self, send: Any) -> None:
        """Send a keep-alive comment on a silent stream, and raise Gone if the client has read nothing for too long.

        A proxy would close a silent connection.  An answer that is not read holds memory.
        """
        await self._start(send)
        last = self._sent if self._direct is None else max(self._sent, self._direct.last)
        idle = time.monotonic() - last
        if self._writing and idle > self.server.write_timeout:
            raise Gone
        if not self._writing and self.comment and idle > self.server.keep_alive:
            self._sent = time.monotonic()
            await send({"type": "http.response.body", "body": self.comment, "more_body": True})

    def _final(self, error: ApiError) -> bytes:
        """Return the end of the body of an answer that has failed: the error as an event."""
        return encode(error.body())


class LongAnswer(EventStream):
    """A JSON answer that is sent in parts.

    An error in the middle breaks the connection, so that the body has no proper end.  Otherwise the client would take
    the part for the whole answer.
    """

    head = [(b"content-type", b"application/json")]
    comment = b""

    def _final(self, error: ApiError) -> bytes:
        """Raise the error, which makes the server break the connection."""
        raise error
