"""Read request bodies as JSON objects, within limits that are checked while the bytes arrive."""

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

from minivllm.runtime.processes.confined import PIECE, JobPart, pieces, size_of
from minivllm.server.errors import CLOSE, ApiError, FlawedMessage
from minivllm.validation import flaw, is_text, lone_escape

from . import bounds
from .cross_site import JSON_EXPECTED, is_json
from .crowd import Crowd

if TYPE_CHECKING:
    from minivllm.server.worker_pool import WorkerPool

# largest size in bytes of a body that the event loop parses, in a few milliseconds; the worker pool parses larger ones
SMALL = 1 << 15
HELD = 16  # limit of an owner's bodies that are being received together, in multiples of the largest body's size
LINGER_SECONDS, LINGER_BYTES = 2.0, 64 << 20  # limits for receiving the rest of a body that was refused


class Bodies:
    """The request bodies that are being received.

    ``held`` maps each owner (an API key, else an address) to the received bytes of the owner's bodies in progress.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.held: Counter[str] = Counter()
        self._late = Crowd()  # spreads the errors of bodies that began together and time out together

    async def read(
        self, request: Request, most: int, seconds: float, owner: str, any_type: bool = False
    ) -> dict[str, Any]:
        """Read a request's body and return it as a JSON object.  ``any_type`` accepts other content types than JSON.

        Raise ApiError: 415 if the content type is not JSON, 413 as soon as the body has more than ``most`` bytes,
        408 if it is not complete after ``seconds``, 429 if the owner has too many bytes in progress, 400 if it is not
        a JSON object or exceeds the limits of ``bounds``.
        """
        kind = request.headers.get("content-type", "")
        if not any_type and not is_json(kind):  # the guard has refused a body of another type already
            raise ApiError(415, f"the request has no body; {JSON_EXPECTED} and a JSON object")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 20 or int(declared) > most):
            raise too_large(most)
        parts: list[bytearray] = []
        with self._counted(owner) as count:
            try:
                await asyncio.wait_for(self._read(request, most, owner, parts, count), seconds)
            except asyncio.TimeoutError:
                await self._late.turn()
                problem = f"the body was not complete after {seconds:g} s"
                raise ApiError(408, problem, headers=CLOSE) from None
            return await self.parse(parts, owner)

    async def parse(self, raw: JobPart, owner: str, inner: str = "") -> dict[str, Any]:
        """Return the JSON object in a body (see ``parse_object``), and check the limits of ``bounds``.

        ``raw`` may be a list of its pieces, which are not joined if they are large, because that takes long.
        ``inner`` is the field of a WebSocket message that has the body; "" means that ``raw`` is the body itself."""
        if size_of(raw) > SMALL:
            return await self.pool.read(raw, owner, inner)
        raw = b"".join(pieces([raw]))
        bounds.check_shape(raw)
        value = load_object(raw)
        try:
            check_text(raw, value)
        except ApiError as e:
            raise FlawedMessage(e, value) if inner else e from None
        body = value.get(inner) if inner else value
        if isinstance(body, dict):
            bounds.check_fields(body)
        return value

    async def _read(self, request: Request, most: int, owner: str, parts: list[bytearray], count: list[int]) -> None:
        """Receive a body into ``parts``, and count its bytes in ``held`` and ``count[0]``.  ApiError: 413 above
        ``most`` bytes, 429 if too many bodies of ``owner`` are being received, 400 if the client disconnects."""
        size = 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large(most)
                if self.held[owner] + len(part) > HELD * most:
                    problem = "too many bodies of your requests are being received; try again later"
                    raise ApiError(429, problem, headers={"Retry-After": "1", "Connection": "close"})
                self.held[owner] += len(part)
                count[0] += len(part)
                if parts and len(parts[-1]) + len(part) <= PIECE:  # a body in a million chunks has few parts
                    parts[-1] += part
                else:
                    parts.append(bytearray(part))
        except ClientDisconnect:
            raise ApiError(400, "the connection closed before the body was complete") from None

    @contextmanager
    def _counted(self, owner: str) -> Iterator[list[int]]:
        """Yield a list [0] in which the caller counts the bytes that it adds to ``held``.  They are subtracted at
        the end."""
        count = [0]
        try:
            yield count
        finally:
            self.held[owner] -= count[0]
            if not self.held[owner]:
                del self.held[owner]  # a Counter reads a missing key as 0


def too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", headers=CLOSE)


class Refusal(JSONResponse):
    """An error answer that is sent before the request's body is complete.

    If the connection closed at once, the kernel would reset it because of the unread data, and the client would never
    read the answer.  So the rest of the body is received and dropped for a while before the connection closes.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drop(receive), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b""})

    async def _drop(self, receive: Any) -> None:
        dropped = 0
        more = True
        while more and dropped < LINGER_BYTES:
            message = await receive()
            dropped += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """Parse a JSON object.

    Raise ApiError (400) if ``raw`` is something else, or has an infinite number or text that ``check_text`` refuses.
    """
    value = load_object(raw)
    check_text(raw, value)
    return value


def check_text(raw: bytes | str, value: dict[str, Any]) -> None:
    """Raise ApiError (400) if an object has half of a surrogate pair.

    JSON can spell it (``\\ud800``), but Unicode text cannot hold it.
    """
    if lone_escape(raw if isinstance(raw, str) else raw.decode("utf-8")):
        field = next((name for name, inner in value.items() if is_text(name) and flaw(inner)), None)
        problem = f"{field or 'the body'} holds half of a surrogate pair (\\ud800 to \\udfff)"
        raise ApiError(400, f"{problem}: expected Unicode text", field)


def load_object(raw: bytes | str) -> dict[str, Any]:
    """Return the JSON object in a body, as ``parse_object`` does, without the check for halves of surrogate pairs.
    ApiError (400) if it is not one."""
    try:
        # decoded here, because json.loads would also accept UTF-16 and surrogates
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ApiError(400, "the JSON of the body is nested too deeply; use fewer levels") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not JSON: it is not UTF-8") from None
    except json.JSONDecodeError as exc:
        raise ApiError(400, f"the body is not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


def _constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not JSON: {name} is not a number")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ApiError(400, f"the number {text[:40]} is out of range; expected a finite number")
    return value


def _int(text: str) -> int:
    if len(text) > 40:  # Python needs long for thousands of digits
        raise ApiError(400, f"the number {text[:20]}... is out of range; expected at most 40 characters")
    return int(text)
