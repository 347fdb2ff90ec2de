"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}``, whatever went wrong.

A message is bounded and printable.  What went wrong inside is in the log, not in the answer: an answer names no path,
address or traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.errors import EngineDeadError, MinivllmError, RequestError

MOST = 600  # characters of a message
TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 408: "RequestTimeoutError", 413: "RequestTooLargeError",
    414: "URLTooLongError", 415: "UnsupportedMediaTypeError", 417: "ExpectationFailedError", 429: "QueueFullError",
    431: "RequestHeadersTooLargeError", 500: "InternalServerError", 501: "NotImplementedError",
    503: "ServiceUnavailableError", 505: "HTTPVersionError",
}  # fmt: skip
INTERNAL = "the server failed on this request; its log says why"


class ApiError(Exception):
    """An answer that is no success: HTTP ``status``, and the field of the request that it is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.headers = status, param, dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": printable(str(self)),
                "type": TYPES.get(self.status, "APIError"),
                "param": None if self.param is None else printable(self.param),
                "code": self.status,
            }
        }


def printable(text: str, most: int = MOST) -> str:
    """The text with control characters escaped, cut to ``most`` characters."""
    text = text if len(text) <= most else f"{text[: most - 4]} ..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def of(exc: BaseException) -> ApiError:
    """The answer to whatever was raised."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        return ApiError(400, str(exc), exc.param)
    if isinstance(exc, EngineDeadError):
        return ApiError(503, "the engine is not running; the server's log says why", headers={"Retry-After": "5"})
    if isinstance(exc, MinivllmError):
        return ApiError(500, INTERNAL)
    return ApiError(500, INTERNAL)
