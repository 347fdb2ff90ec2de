"""The way of one request through the server, which completions and chat completions share.

    body ──check──► prompts ──door──► ids ──params──► streams ──pieces──► choices of the protocol

What a request holds (its place inside, its streams) lies on an exit stack: it is given back when the answer ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from . import body as bodies
from . import errors, logs
from .errors import ApiError
from .protocol import common
from .sse import DONE, EventStream, Gone, encode, supervise

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig
    from minivllm.core.request import SamplingParams

    from .client import EngineClient, Piece, Stream
    from .limits import Door
    from .metrics import Metrics
    from .tokens import Tokens


@dataclass
class Service:
    """What every route works with.  ``names`` are those of the model; ``defaults`` is the ``[sampling]`` table."""

    client: EngineClient
    server: ServerConfig
    names: Sequence[str]
    tokens: Tokens
    door: Door
    metrics: Metrics
    defaults: Mapping[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """The name that the answer has.  ApiError (404) for a model that is not served."""
        if name is None or name == "":
            return self.names[0]
        if name not in self.names:
            raise ApiError(404, f"The model `{errors.printable(name, 100)}` does not exist.", "model")
        return name


@dataclass
class Answer:
    """Streams of one request and what they have in common.  The choice of sample ``s`` of prompt ``p`` has the number
    ``p * n + s``."""

    service: Service
    id: str
    object: str
    model: str
    streams: list[Stream]
    n: int
    include_usage: bool = False
    continuous: bool = False
    warnings: list[dict[str, str]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # of an answer in one piece, beside its choices
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        prompt = sum(s.prompt_tokens for s in self.streams)
        completion = sum(s.completion_tokens for s in self.streams)
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in self.streams)},
        }  # fmt: skip

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(number of the choice, piece) as they come.  ApiError (500) if the engine failed on a branch."""
        if len(self.streams) == 1:
            async for piece in self.streams[0]:
                yield piece.sample, self._whole(piece)
            return
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=2 * len(self.streams))

        async def pump(at: int, stream: Stream) -> None:
            try:
                async for piece in stream:
                    await queue.put((at * self.n + piece.sample, piece))
                await queue.put(None)
            except Exception as exc:
                await queue.put(exc)

        tasks = [asyncio.create_task(pump(at, stream)) for at, stream in enumerate(self.streams)]
        try:
            left = len(tasks)
            while left:
                got = await queue.get()
                if got is None:
                    left -= 1
                elif isinstance(got, Exception):
                    raise got
                else:
                    yield got[0], self._whole(got[1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _whole(self, piece: Piece) -> Piece:
        if piece.finish_reason == "error":
            logs.event("the engine failed on a request", 40, answer=self.id, reason=piece.error)
            raise ApiError(500, "the engine failed on this request; the server's log says why")
        return piece

    async def events(self, choices: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """Server-sent events."""
        async for chunk in self.chunks(choices):
            yield encode(chunk)
        yield DONE

    async def chunks(self, choices: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream, one a choice that has something to say."""
        head = self.head()
        first = {"warnings": self.warnings} if self.warnings else {}
        async for choice in choices:
            chunk = {**head, "choices": [choice], **first}
            if self.include_usage:
                chunk["usage"] = self.usage() if self.continuous else None
            first = {}
            yield chunk
        if self.include_usage:
            yield {**head, "choices": [], "usage": self.usage()}

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        out = {**self.head(), "choices": choices, "usage": self.usage(), "system_fingerprint": None, **self.more}
        return {**out, "warnings": self.warnings} if self.warnings else out


async def read_body(request: Request, service: Service, model: type[Any]) -> Any:
    """The body within the limits.  ApiError where it is wrong, or where nobody can answer it now."""
    server = service.server
    return common.read(model, await bodies.read_object(request, server.max_body_bytes, server.body_timeout))


def check_counts(service: Service, prompts: int, n: int | None, best_of: int | None = None) -> None:
    """ApiError (400) for more answers than one request may ask for."""
    most, n = service.server.max_n, 1 if n is None else n
    if not 1 <= n <= most:
        raise ApiError(400, f"n={str(n)[:24]}: want a whole number from 1 to {most}", "n")
    if best_of is not None and not n <= best_of <= most:
        raise ApiError(400, f"best_of={str(best_of)[:24]}: want a whole number from n={n} to {most}", "best_of")
    if prompts * (best_of or n) > service.server.max_choices:
        what = f"{prompts} prompts times " + (f"n={n}" if best_of is None else f"best_of={best_of}")
        raise ApiError(
            400,
            f"{what}: want at most {service.server.max_choices} answers in a request",
            "best_of" if best_of else "n",
        )


def stream_options(body: Any) -> tuple[bool, bool]:
    """(usage at the end, usage in every chunk).  ApiError (400) for options of a stream where none was asked for."""
    options = body.stream_options
    if options is None:
        return False, False
    if not body.stream:
        raise ApiError(400, "stream_options: want it only with stream=true", "stream_options")
    return bool(options.include_usage or options.continuous_usage_stats), bool(options.continuous_usage_stats)


def seconds_of(service: Service, asked: float | None) -> float:
    most = service.server.request_timeout
    if asked is not None and not asked > 0:
        raise ApiError(400, f"timeout_s={asked}: want a positive number of seconds", "timeout_s")
    return most if asked is None else min(asked, most)


async def open_streams(
    service: Service, held: AsyncExitStack, request_id: str, prompts: Sequence[tuple[list[int], SamplingParams]],
    pieces: bool, log: dict[str, Any],
) -> list[Stream]:  # fmt: skip
    """One stream a prompt, closed by ``held``.  The error of the first that is refused; then none stays."""
    client = service.client
    opened = await asyncio.gather(
        *(
            client.stream(ids, params, f"{request_id}-{number}", pieces=pieces)
            for number, (ids, params) in enumerate(prompts)
        ),
        return_exceptions=True,
    )
    streams: list[Stream] = [one for one in opened if not isinstance(one, BaseException)]

    async def close() -> None:
        for stream in streams:
            await stream.aclose()
            service.metrics.finished(stream)
        log.update(
            prompt_tokens=sum(s.prompt_tokens for s in streams),
            completion_tokens=sum(s.completion_tokens for s in streams),
        )

    held.push_async_callback(close)
    for one in opened:
        if isinstance(one, BaseException):
            raise one
    return streams


async def respond(
    request: Request, service: Service, stream: bool, seconds: float,
    prepare: Callable[[AsyncExitStack], Any], chunks: Callable[[Answer], AsyncIterator[dict[str, Any]]],
    whole: Callable[[Answer], Any],
) -> Any:  # fmt: skip
    """``prepare`` makes the Answer, ``chunks`` the choices of a stream, ``whole`` those of an answer in one piece."""
    state = request.scope["state"]
    end = time.monotonic() + seconds
    async with AsyncExitStack() as held:
        try:
            answer = await supervise(prepare(held), request.receive, service.door, seconds)
            left = max(end - time.monotonic(), 0.001)
            if stream:
                return EventStream(answer.events(chunks(answer)), held.pop_all(), service.door, service.server, left)
            choices = await supervise(whole(answer), request.receive, service.door, left)
            return JSONResponse(answer.whole(choices))
        except Gone:
            state["log"]["gone"] = True
            return Response(status_code=499)  # nobody reads it
