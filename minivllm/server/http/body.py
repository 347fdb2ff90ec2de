"""The bytes of a request to a JSON object, within limits that hold while they are read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from minivllm.server.errors import ApiError
from minivllm.validation import flaw, is_text, lone_escape

from . import bounds
from .cross_site import JSON_WANTED, is_json
from .crowd import Crowd

if TYPE_CHECKING:
    from minivllm.server.worker_pool import WorkerPool

SMALL = 1 << 15  # bytes: a few milliseconds at most, whatever they are; of more the worker pool takes care
HELD = 16  # bodies of the largest size that one asker may have on their way
LINGER_SECONDS, LINGER_BYTES = 2.0, 64 << 20  # for what still comes of a body that was refused


class Bodies:
    """The bodies that are on their way.  ``held``: bytes of each asker's that have come and are not read yet."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.held: Counter[str] = Counter()
        self._late = Crowd()  # bodies that began together are late together

    async def read(self, request: Request, most: int, seconds: float, who: str) -> dict[str, Any]:
        """The body as a JSON object.  ApiError: 415 if its type is not JSON, 413 as soon as it is over ``most`` bytes,
        408 if it has not come after ``seconds``, 429 if as many others of this asker are on their way, 400 if it is no
        JSON object, or one that holds more than a request can need (``bounds``)."""
        if not is_json(request.headers.get("content-type", "")):  # the guard has looked at those of other bodies
            raise ApiError(415, f"the request has no body; {JSON_WANTED}, and a JSON object")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 20 or int(declared) > most):
            raise too_large(most)
        parts: list[bytes] = []
        with self._counted(who) as count:
            try:
                await asyncio.wait_for(self._read(request, most, who, parts, count), seconds)
            except asyncio.TimeoutError:
                await self._late.turn()
                what = f"the body did not come within {seconds:g} s"
                raise ApiError(408, what, headers={"Connection": "close"}) from None
            return await self.parse(b"".join(parts), who)

    async def parse(self, raw: bytes, who: str, inner: str = "") -> dict[str, Any]:
        """``parse_object`` and the bounds of ``bounds``; ``inner``: the field that holds the body."""
        if len(raw) > SMALL:
            return await self.pool.read(raw, who, inner)
        bounds.check_shape(raw)
        value = load_object(raw)
        if not inner:
            check_text(raw, value)  # of a message, its id is wanted first
        body = value.get(inner) if inner else value
        if isinstance(body, dict):
            bounds.check_fields(body)
        return value

    async def _read(self, request: Request, most: int, who: str, parts: list[bytes], count: list[int]) -> None:
        size = 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large(most)
                if self.held[who] + len(part) > HELD * most:
                    what = "too many of your requests' bodies are on their way; try again later"
                    raise ApiError(429, what, headers={"Retry-After": "1", "Connection": "close"})
                self.held[who] += len(part)
                count[0] += len(part)
                parts.append(part)
        except ClientDisconnect:
            raise ApiError(400, "the connection closed before the body was whole") from None

    @contextmanager
    def _counted(self, who: str) -> Iterator[list[int]]:
        """What the caller adds to the list's one number, and to ``held``, is taken off again."""
        count = [0]
        try:
            yield count
        finally:
            self.held[who] -= count[0]
            if not self.held[who]:
                del self.held[who]  # which reads as 0


def too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", headers={"Connection": "close"})


class Refusal(JSONResponse):
    """An answer that is said before the body has come whole.

    A connection that closes while something is on its way is reset, and the answer with it: its sender would never
    hear what was wrong.  So what still comes is dropped for a while, and then the connection closes."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drop(receive), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b""})

    async def _drop(self, receive: Any) -> None:
        left, more = LINGER_BYTES, True
        while more and left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """ApiError (400) for anything that is not one JSON object of finite numbers and, see ``check_text``, of text."""
    value = load_object(raw)
    check_text(raw, value)
    return value


def check_text(raw: bytes | str, value: dict[str, Any]) -> None:
    """ApiError (400) for half of a surrogate pair anywhere in an object, which JSON can spell and no text can hold."""
    if lone_escape(raw if isinstance(raw, str) else raw.decode("utf-8")):
        field = next((name for name, one in value.items() if is_text(name) and flaw(one)), None)
        raise ApiError(
            400, f"{field or 'the body'} holds half of a surrogate pair (\\ud800 to \\udfff): want Unicode text", field
        )


def load_object(raw: bytes | str) -> dict[str, Any]:
    """``parse_object`` without a look at surrogates."""
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")  # json would take UTF-16 and surrogates too
        value = json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ApiError(400, "the JSON of the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is no JSON: it is not UTF-8") from None
    except json.JSONDecodeError as exc:
        raise ApiError(400, f"the body is no JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object")
    return value


def _constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is no JSON: {name} is no number")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ApiError(400, f"the number {text[:40]} is out of range")
    return value


def _int(text: str) -> int:
    if len(text) > 40:  # and Python takes its time over thousands of digits
        raise ApiError(400, f"the number {text[:20]}... is out of range")
    return int(text)
