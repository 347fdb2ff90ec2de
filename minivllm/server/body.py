"""The bytes of a request to a JSON object, within limits that hold while they are read."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from minivllm.plain import flaw, is_text, lone_escape

from .cross_site import JSON_WANTED, is_json
from .errors import ApiError

# times the limit: of a larger body that much is read, and dropped, before it is refused.  A connection that closes
# while something is on its way is reset, and the answer with it: its sender would never hear what was wrong.
LINGER = 8


async def read_object(request: Request, most: int, seconds: float) -> dict[str, Any]:
    """The body as a JSON object.  ApiError: 415 if its type is not JSON, 413 over ``most`` bytes, 408 if it has not
    come after ``seconds``, 400 if it is no JSON object."""
    if not is_json(
        request.headers.get("content-type", "")
    ):  # the guard has looked at those of bodies that are not empty
        raise ApiError(415, f"the request has no body; {JSON_WANTED}, and a JSON object")
    declared = request.headers.get("content-length", "")
    told = int(declared[:20]) if declared.isdecimal() else 0
    large = ApiError(413, f"the body is larger than {most} bytes", headers={"Connection": "close"})
    if told > LINGER * most or (told > most and "expect" in request.headers):
        raise large
    parts: list[bytes] = []
    try:
        size = await asyncio.wait_for(_read(request, most, parts), seconds)
    except asyncio.TimeoutError:
        what = f"the body did not come within {seconds:g} s"
        over = max(told, sum(map(len, parts))) > most
        raise large if over else ApiError(408, what, headers={"Connection": "close"}) from None
    if size > most:
        raise large
    return parse_object(b"".join(parts))


async def _read(request: Request, most: int, parts: list[bytes]) -> int:
    """Its bytes; ``parts`` get it, of a larger one no more than shows that it is larger."""
    size = 0
    try:
        async for part in request.stream():
            if size <= most:
                parts.append(part)
            size += len(part)
            if size > LINGER * most:
                break
    except ClientDisconnect:
        raise ApiError(400, "the connection closed before the body was whole") from None
    return size


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
