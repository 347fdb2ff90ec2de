"""What stands before every route: limits on headers, hosts, origins, keys, request ids, the log, and the answer to what
nobody caught.

It decides by the raw path and headers of the connection: no framework has touched them.
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
from minivllm.server.errors import ApiError
from minivllm.server.fair_queue import owner_of

from . import cross_site
from .auth import ApiKeys
from .connection import CROWDED, POLLED, unknown_coding

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

OPEN = frozenset({"/health"})  # routes that need no key
TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,256})?")  # W3C Trace Context
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Guard:
    """ASGI middleware around the whole application.  ``scope["state"]`` gets ``request_id`` (ours), ``echoed`` (what
    the client calls it), ``tenant``, ``owner`` (whose budget it is, see ``line``) and ``trace`` (W3C trace context); a
    route may add ``log``, values for the request's line in the log."""

    def __init__(self, app: Any, keys: ApiKeys, server: ServerConfig, metrics: Any = None) -> None:
        self.app, self.keys, self.metrics = app, keys, metrics
        self.max_header_bytes, self.max_headers = server.max_header_bytes, server.max_headers
        self.hosts = cross_site.Hosts(server.allowed_hosts, server.host, bool(keys))
        self.origins = server.allowed_origins

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = uuid.uuid4().hex
        echoed = given if REQUEST_ID.fullmatch(given) else request_id
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, echoed=echoed, tenant="", owner="", log={}, trace=trace_of(headers))
        start, status = time.monotonic(), 0

        def answer(message: Any) -> Any:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", echoed.encode())]
            return send(message)  # to be awaited

        # who asks with HEAD is answered as with GET; uvicorn leaves the body out
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            self._check(scope, headers, state)
            await self.app(asked, receive, answer)
        except asyncio.CancelledError:  # the server ends now: uvicorn would call it 500
            if not status:
                await send_error(answer, ApiError(503, "the server is shutting down", headers={"Connection": "close"}))
        except Exception as exc:
            error = errors.of(exc)
            if error.status == 500:
                logs.log.error("request %s failed", request_id, exc_info=exc)
            if not status:
                await send_error(answer, error)
        finally:
            path = errors.printable(scope["path"], 128)
            seconds = time.monotonic() - start
            if self.metrics is not None:
                self.metrics.http(asked.get("route"), status)
            more: Any = {"client_id": echoed} if echoed != request_id else {}
            polled = status in (200, 503) and asked_path(scope) in POLLED
            logs.event(
                "request",
                logging.DEBUG if polled else logging.INFO,
                request_id=request_id,
                **more,
                method=scope["method"],
                path=path,
                status=status,
                ms=round(1e3 * seconds, 1),
                **state["log"],
            )

    async def _socket(self, scope: Any, receive: Any, send: Any) -> None:
        """A WebSocket: its key may come later, so the route looks at it."""
        request_id, start = uuid.uuid4().hex, time.monotonic()
        state = scope.setdefault("state", {})
        trace = trace_of(dict(scope["headers"]))
        state.update(request_id=request_id, tenant="", log={}, trace=trace)
        answer = Answering(send)
        try:
            self._limits(scope)
            self._whence(scope, True)
            await self.app(scope, receive, answer)
        except Exception as exc:
            error = errors.of(exc)
            if error.status == 500:
                logs.log.error("socket %s failed", request_id, exc_info=exc)
            if answer.begun:
                raise  # it ends the connection
            await receive()  # the handshake, which is refused
            await send_error(send, error, "websocket.http.response")
        finally:
            path, ms = errors.printable(scope["path"], 128), 1e3 * (time.monotonic() - start)
            logs.event("socket", request_id=request_id, path=path, ms=round(ms, 1), **state["log"])

    def _limits(self, scope: Any) -> None:
        """Raise ApiError (431, 414) for headers or a URL that are larger than they may be."""
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if len(scope["headers"]) > self.max_headers or size > self.max_header_bytes:
            what = f"{len(scope['headers'])} headers of {size} bytes"
            want = f"at most {self.max_headers} of {self.max_header_bytes} bytes together"
            raise ApiError(431, f"{what}; want {want}", headers={"Connection": "close"})
        url = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if url > self.max_header_bytes:
            what = f"the URL has {url} bytes; want at most {self.max_header_bytes}"
            raise ApiError(414, what, headers={"Connection": "close"})

    def _whence(self, scope: Any, changes: bool) -> None:
        """ApiError for a name that is not ours and, if the request changes anything, for a page that is not."""
        reached = (scope.get("server") or ("",))[0]
        self.hosts.check(scope["headers"], reached, scope.get("http_version", "1.1"))
        if changes:
            cross_site.check_origin(scope["headers"], self.origins)

    def _check(self, scope: Any, headers: dict[bytes, bytes], state: dict[str, Any]) -> None:
        changes = scope["method"] not in cross_site.SAFE
        self._limits(scope)
        if state.get("spare") and asked_path(scope) not in POLLED:
            raise ApiError(503, CROWDED, headers={"Retry-After": "1", "Connection": "close"})
        self._whence(scope, changes)
        if odd := unknown_coding(cross_site.values(scope["headers"], b"transfer-encoding")):
            raise ApiError(501, odd, headers={"Connection": "close"})
        expected = headers.get(b"expect", b"100-continue").decode("latin-1")
        if expected.lower() != "100-continue":
            what = f"Expect: {errors.printable(expected, 40)} cannot be met; want 100-continue"
            raise ApiError(417, what, headers={"Connection": "close"})
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise ApiError(400, "Content-Length beside Transfer-Encoding: want one", headers={"Connection": "close"})
        if scope["method"] == "OPTIONS":
            cross_site.check_preflight(scope["headers"], self.origins)
        if asked_path(scope) not in OPEN:
            tenant = self.keys.tenant(headers)
            if tenant is None:
                what = "want a valid API key: Authorization: Bearer KEY"
                raise ApiError(401, what, headers={"WWW-Authenticate": "Bearer"})
            state["tenant"], state["owner"] = tenant, owner_of(tenant, scope.get("client"))
        if changes:
            cross_site.check_json(scope["headers"])


def asked_path(scope: Any) -> str:
    """The path that was asked for: uvicorn puts ``root_path`` before it."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


class Answering:
    """``send`` that remembers whether an answer has begun: after that no other can be given."""

    def __init__(self, send: Any) -> None:
        self._send, self.begun = send, False

    def __call__(self, message: Any) -> Any:
        self.begun = True
        return self._send(message)  # to be awaited


async def contained(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """What fails in the middleware itself is answered like anything else; uvicorn would say it in plain text."""
    answer = Answering(send)
    try:
        await app(scope, receive, answer)
    except Exception as exc:
        if answer.begun or scope["type"] not in ("http", "websocket"):
            raise
        logs.log.error("the server failed before or behind its routes", exc_info=exc)
        await send_error(send, errors.of(exc), f"{'websocket.' * (scope['type'] == 'websocket')}http.response")


def trace_of(headers: dict[bytes, bytes]) -> dict[str, str] | None:
    """The caller's place in a trace; what is malformed is as good as absent, as W3C has it."""
    if not TRACE.fullmatch(headers.get(b"traceparent", b"")):
        return None
    names = (b"traceparent", b"tracestate")
    return {name.decode(): headers[name].decode("latin-1") for name in names if name in headers}


async def send_error(send: Any, error: ApiError, kind: str = "http.response") -> None:
    """The whole answer."""
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
    await send({"type": f"{kind}.start", "status": error.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
