"""Errors in the JSON form that the clients of each protocol read.

    OpenAI      {"error": {"message", "type", "param", "code"}}
    Anthropic   {"type": "error", "error": {"type", "message"}, "request_id"}     /v1/messages and below
    Ollama      {"error": "message"}                                   /api/chat and the others of Ollama

A message is short and printable.  The cause of an internal error is written to the log.  The answer does not contain
it, because it could reveal a path, an address or a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minivllm.errors import EngineDeadError, RequestError

MOST = 600  # largest number of characters of a message
TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 408: "RequestTimeoutError", 413: "RequestTooLargeError",
    414: "URLTooLongError", 415: "UnsupportedMediaTypeError", 417: "ExpectationFailedError", 429: "QueueFullError",
    431: "RequestHeadersTooLargeError", 500: "InternalServerError", 501: "NotImplementedError",
    503: "ServiceUnavailableError", 505: "HTTPVersionError",
}  # fmt: skip
# types of errors in Anthropic's API, by status (https://docs.claude.com/en/api/errors)
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
CLOSE = {"Connection": "close"}  # header of an answer that ends the connection
# paths of these protocols
MESSAGES = "/v1/messages"
ANTHROPIC = re.compile(r"(/v1)?/v1/messages(/.*)?")
OLLAMA = re.compile(r"/api/(chat|generate|tags|show|version|ps|embed|embeddings|pull|push|create|copy|delete)")
INTERNAL = "the server failed on this request; its log has the reason"


class ApiError(Exception):
    """An error answer with an HTTP ``status``.

    ``param`` names the field of the request that caused it, if there is one.  ``code`` is the error code in the API of
    the client, if clients compare it.  Without ``code``, the status is the code of OpenAI's API.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param
        self.headers = dict(headers or {})

    def body(self, path: str = "", request_id: str = "") -> dict[str, Any]:
        """Return the answer's body, to be written as JSON.

        ``path`` is the path of the request without ``root_path``; it decides the protocol of the answer.
        ``request_id`` is the id in the answer's header, or "" if it is unknown."""
        message = printable(str(self))
        if OLLAMA.fullmatch(path):
            return {"error": message}
        if ANTHROPIC.fullmatch(path):
            fallback = "invalid_request_error" if self.status < 500 else "api_error"
            kind = ANTHROPIC_TYPES.get(self.status, fallback)
            error: dict[str, Any] = {"type": kind, "message": message}
            if self.code:
                error["details"] = {"error_code": self.code}
            return {"type": "error", "error": error, "request_id": request_id or None}
        kind = TYPES.get(self.status, "APIError")
        param = None if self.param is None else printable(self.param)
        code = self.code or self.status
        fields = {"message": message, "type": kind, "param": param, "code": code}
        return {"error": fields}


class FlawedMessage(ApiError):
    """The ``error`` of a WebSocket message whose text is not Unicode, with the parsed ``message``, whose id the answer
    repeats."""

    def __init__(self, error: ApiError, message: dict[str, Any]) -> None:
        super().__init__(error.status, str(error), error.param)
        self.message = message


def wrong(place: str, text: str) -> ApiError:
    """Return the error (400) about a place of the body.  ``text`` follows the place in the message."""
    return ApiError(400, place + text, place)


def printable(text: str, most: int = MOST) -> str:
    """Return a text, cut to ``most`` characters, with its control characters escaped."""
    if len(text) > most:
        text = f"{text[: most - 4]} ..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def of(exc: BaseException) -> ApiError:
    """Return the error answer for an exception.

    A ``RequestError`` becomes 400, a dead engine 503 and any unexpected exception 500.
    """
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        return ApiError(400, str(exc), exc.param)
    if isinstance(exc, EngineDeadError):
        return ApiError(503, "the engine is not running; the server's log has the reason", headers={"Retry-After": "5"})
    return ApiError(500, INTERNAL)
