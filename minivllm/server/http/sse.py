"""Server-sent events, and the watch over every answer: who asked has gone, reads nothing, waits too long, or has to go.

The work of an answer is a task of its own; beside it one waits for the client to leave.  Leaving it, for whatever
reason, ends the work and gives back what it holds.
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

TICK = 1.0  # seconds between looks at the clock
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]  # fmt: skip


class Gone(Exception):
    """Nobody reads the answer any more."""


def dump(value: Any) -> bytes:
    """Compact JSON; half a surrogate pair, which UTF-8 has not, becomes "?"."""
    try:
        return to_json(value)  # a chunk a token: six times as fast as json
    except ValueError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encode(event: Any) -> bytes:
    return b"data: " + dump(event) + b"\n\n"


async def supervise(
    work: Coroutine[Any, Any, Any],
    receive: Any,
    door: Door,
    seconds: float,
    look: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Any:
    """The result of ``work``.  Gone if the client leaves first, ApiError if it takes longer than ``seconds`` (408) or
    the server ends (503).  ``look`` is called now and then; what it raises ends the work too."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    end = time.monotonic() + seconds
    try:
        while True:
            left = end - time.monotonic()
            await asyncio.wait(
                {task, gone, door.ended}, timeout=max(min(left, TICK), 0), return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
            if gone.done():
                raise Gone
            if door.ended.done():
                raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
            if left <= 0:
                raise ApiError(408, f"the answer took longer than {seconds:g} s")
            if look is not None:
                await look()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An ASGI response that sends ``events`` (bytes) as they come.  ``held`` is closed when it ends, in every case.

    Its status goes out with the first event, or after a second: what fails before that has a status of its own.
    ``events`` may write others itself once it has begun (``connection.Direct``, the connection's).
    """

    head = HEADERS
    comment = b": keep-alive\n\n"  # sent while there is nothing to say

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
        self.events, self.held, self.door, self.server, self.seconds = events, held, door, server, seconds
        self._sent = time.monotonic()
        self._writing = self._started = False
        self._direct: Direct | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._direct = scope["state"].get("direct")
        async with self.held:
            last = b""
            try:
                await supervise(self._write(send), receive, self.door, self.seconds, lambda: self._look(send))
            except Gone:
                scope["state"]["log"]["gone"] = True
                if not self._started:
                    await Response(status_code=499)(scope, receive, send)  # nobody reads it
                return
            except Exception as exc:
                error = errors.of(exc)
                if error.status == 500:
                    logs.log.error("request %s failed", scope["state"]["request_id"], exc_info=exc)
                if not self._started:
                    raise error from exc
                scope["state"]["log"]["error"] = error.status
                last = self._last_words(error)
            await self._start(send)
            await send({"type": "http.response.body", "body": last})

    async def _start(self, send: Any) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": [*self.head, *self.more]})

    async def _write(self, send: Any) -> None:
        async for event in self.events:
            await self._start(send)
            self._writing, self._sent = True, time.monotonic()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._writing, self._sent = False, time.monotonic()

    async def _look(self, send: Any) -> None:
        """Proxies close a connection on which nothing is said; a reader who takes nothing holds memory."""
        await self._start(send)
        last = self._sent if self._direct is None else max(self._sent, self._direct.last)
        idle = time.monotonic() - last
        if self._writing and idle > self.server.write_timeout:
            raise Gone
        if not self._writing and self.comment and idle > self.server.keep_alive:
            self._sent = time.monotonic()
            await send({"type": "http.response.body", "body": self.comment, "more_body": True})

    def _last_words(self, error: ApiError) -> bytes:
        return encode(error.body())


class LongAnswer(EventStream):
    """JSON that is sent as it is made.  What fails on the way breaks the connection: its reader must not take a part of
    an answer for the whole, and only the end of a body says that it is whole."""

    head = [(b"content-type", b"application/json")]
    comment = b""

    def _last_words(self, error: ApiError) -> bytes:
        raise error
