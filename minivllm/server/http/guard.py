"""The guard in front of every route: check headers, host, origin and API key, assign request ids, and log requests.

It also answers exceptions that no route handles.  Its checks use the raw path and headers of the connection, before a
framework changes them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from minivllm.server import errors, logs
from minivllm.server.errors import CLOSE, ApiError
from minivllm.server.fair_queue import owner_of

from . import cross_site
from .auth import ApiKeys
from .connection import CROWDED, POLLED, unknown_coding

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig
    from minivllm.server.page.files import Page

OPEN = frozenset({"/health", "/ping"})  # routes that require no key
TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,256})?")  # W3C Trace Context
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Guard:
    """ASGI middleware around the whole application.

    It stores in ``scope["state"]``: ``request_id``, made here; ``echoed``, the id in the answer, which is the client's
    own if it sent a valid one; ``tenant``, the name of the API key; ``owner``, which shares limits (``fair_queue``);
    ``identity``, under which an API key's responses are stored; ``trace``, the W3C trace context; and ``log``, to which
    a route may add values of the request's log line.  The files of ``page`` require no key, because a browser asks for
    them without one.
    """

    def __init__(
        self, app: Any, keys: ApiKeys, server: ServerConfig, metrics: Any = None, page: Page | None = None
    ) -> None:
        self.app, self.keys, self.metrics, self.page = app, keys, metrics, page
        self.max_header_bytes, self.max_headers = server.max_header_bytes, server.max_headers
        self.hosts = cross_site.Hosts(server.allowed_hosts, server.host, bool(keys))
        self.origins = server.allowed_origins

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Check an HTTP request, pass it to the application, answer its exceptions and log it."""
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = uuid.uuid4().hex
        echoed = client_id if REQUEST_ID.fullmatch(client_id) else request_id
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, echoed=echoed, tenant="", owner="", identity="", log={})
        state["trace"] = trace_of(headers)
        state["session"] = session_of(headers)
        start = time.monotonic()
        status = 0  # no answer yet

        def answer(message: Any) -> Any:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(b"x-request-id", echoed.encode())]
                if is_anthropic(scope):
                    ids.append((b"request-id", echoed.encode()))
                message["headers"] = [*message.get("headers", ()), *ids]
            return send(message)  # returned instead of awaited, because the caller awaits it

        # HEAD runs as GET, and uvicorn leaves out the body
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            self._check(scope, headers, state)
            await self.app(inner, receive, answer)
        except asyncio.CancelledError:  # the server ends; uvicorn would answer 500
            if not status:
                await send_error(answer, ApiError(503, "the server is shutting down", headers=CLOSE), scope)
        except Exception as exc:
            error = errors.of(exc)
            if error.status == 500:
                logs.log.error("request %s failed", request_id, exc_info=exc)
            if not status:
                await send_error(answer, error, scope)
        finally:
            if self.metrics is not None:
                self.metrics.http(inner.get("route"), status)
            polled = status in (200, 503) and requested_path(scope) in POLLED
            more: Any = {"client_id": echoed} if echoed != request_id else {}
            logs.event(
                "request",
                logging.DEBUG if polled else logging.INFO,
                request_id=request_id,
                **more,
                method=scope["method"],
                path=errors.printable(scope["path"], 128),
                status=status,
                ms=round(1e3 * (time.monotonic() - start), 1),
                **state["log"],
            )

    async def _socket(self, scope: Any, receive: Any, send: Any) -> None:
        """Check and serve a WebSocket connection.  The route checks the API key, which may come in a message."""
        request_id = uuid.uuid4().hex
        start = time.monotonic()
        state = scope.setdefault("state", {})
        headers = dict(scope["headers"])
        state.update(request_id=request_id, tenant="", log={}, trace=trace_of(headers), session=session_of(headers))
        answer = RememberingSend(send)
        try:
            self._check_sizes(scope)
            self._check_site(scope, True)
            await self.app(scope, receive, answer)
        except Exception as exc:
            error = errors.of(exc)
            if error.status == 500:
                logs.log.error("socket %s failed", request_id, exc_info=exc)
            if answer.begun:
                raise  # uvicorn ends the connection
            await receive()  # receive the message of the handshake, which the error then answers
            await send_error(send, error, scope, "websocket.http.response")
        finally:
            path, ms = errors.printable(scope["path"], 128), 1e3 * (time.monotonic() - start)
            logs.event("socket", request_id=request_id, path=path, ms=round(ms, 1), **state["log"])

    def _check_sizes(self, scope: Any) -> None:
        """Raise ApiError (431 or 414) for headers or a URL beyond the limits."""
        count = len(scope["headers"])
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if count > self.max_headers or size > self.max_header_bytes:
            most = f"at most {self.max_headers} of {self.max_header_bytes} bytes together"
            problem = f"{count} headers of {size} bytes; expected {most}"
            raise ApiError(431, problem, headers=CLOSE)
        url = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if url > self.max_header_bytes:
            problem = f"the URL has {url} bytes; expected at most {self.max_header_bytes}"
            raise ApiError(414, problem, headers=CLOSE)

    def _check_site(self, scope: Any, changes: bool) -> None:
        """Raise ApiError for an unknown ``Host`` and, if the request may change anything, for a foreign ``Origin``."""
        reached = (scope.get("server") or ("",))[0]
        self.hosts.check(scope["headers"], reached, scope.get("http_version", "1.1"))
        if changes:
            cross_site.check_origin(scope["headers"], self.origins)

    def _check(self, scope: Any, headers: dict[bytes, bytes], state: dict[str, Any]) -> None:
        """Raise ApiError for a request that must not reach a route.  Store the tenant and the owner in ``state``."""
        changes = scope["method"] not in cross_site.SAFE
        self._check_sizes(scope)
        if state.get("spare") and requested_path(scope) not in POLLED:
            raise ApiError(503, CROWDED, headers={"Retry-After": "1", "Connection": "close"})
        self._check_site(scope, changes)
        if odd := unknown_coding(cross_site.values(scope["headers"], b"transfer-encoding")):
            raise ApiError(501, odd, headers=CLOSE)
        expected = headers.get(b"expect", b"100-continue").decode("latin-1")
        if expected.lower() != "100-continue":
            problem = f"Expect: {errors.printable(expected, 40)} is not supported; expected 100-continue"
            raise ApiError(417, problem, headers=CLOSE)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            problem = "the request has both Content-Length and Transfer-Encoding: expected one of them"
            raise ApiError(400, problem, headers=CLOSE)
        if scope["method"] == "OPTIONS":
            cross_site.check_preflight(scope["headers"], self.origins)
        path = requested_path(scope)
        is_page = self.page is not None and self.page.serves(scope, path)
        if path not in OPEN and not is_page:
            tenant = self.keys.tenant(headers)
            if tenant is None:
                problem = "expected a valid API key: Authorization: Bearer KEY"
                raise ApiError(401, problem, headers={"WWW-Authenticate": "Bearer"})
            state["tenant"], state["owner"] = tenant, owner_of(tenant, scope.get("client"))
            state["identity"] = self.keys.identity(tenant)
        # Ollama's clients and documentation send JSON with other content types; a web page cannot send such a request
        lenient = errors.OLLAMA.fullmatch(requested_path(scope)) and not cross_site.from_page(scope["headers"])
        if changes and not lenient:
            cross_site.check_json(scope["headers"])


def requested_path(scope: Any) -> str:
    """Return the path of a request without ``root_path``, which uvicorn puts before it."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


class RememberingSend:
    """ASGI's ``send``, which sets ``begun`` when an answer begins.  After that no error can be sent."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self.begun = False

    def __call__(self, message: Any) -> Any:
        self.begun = True
        return self._send(message)  # returned instead of awaited, because the caller awaits it


async def contained(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """Run the application, and answer an exception of its middleware as JSON.  uvicorn would send plain text."""
    answer = RememberingSend(send)
    try:
        await app(scope, receive, answer)
    except Exception as exc:
        if answer.begun or scope["type"] not in ("http", "websocket"):
            raise
        logs.log.error("the server failed outside of its routes", exc_info=exc)
        kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
        await send_error(send, errors.of(exc), scope, kind)


def session_of(headers: dict[bytes, bytes]) -> str:
    """Return the name of the session of a request (``X-Session-Id``, 256 characters of it), or "" without one."""
    return headers.get(b"x-session-id", b"").decode("latin-1")[:256]


def trace_of(headers: dict[bytes, bytes]) -> dict[str, str] | None:
    """Return the W3C trace headers of a request, or None if they are missing or malformed."""
    if not TRACE.fullmatch(headers.get(b"traceparent", b"")):
        return None
    names = (b"traceparent", b"tracestate")
    return {name.decode(): headers[name].decode("latin-1") for name in names if name in headers}


def is_anthropic(scope: Any) -> bool:
    """Return whether a request uses Anthropic's protocol, which its path or its header ``anthropic-version`` shows."""
    if errors.ANTHROPIC.fullmatch(requested_path(scope)):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_body(error: ApiError, scope: Any) -> dict[str, Any]:
    """Return the body of an error in the protocol of the request's client."""
    path = errors.MESSAGES if is_anthropic(scope) else requested_path(scope)
    state = scope.get("state") or {}
    return error.body(path, state.get("echoed", ""))


async def send_error(send: Any, error: ApiError, scope: Any, kind: str = "http.response") -> None:
    """Send an error as a complete answer to a request.  ``kind`` is the prefix of the ASGI message types."""
    body = json.dumps(error_body(error, scope)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
    await send({"type": f"{kind}.start", "status": error.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
