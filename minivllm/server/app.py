"""The application: every route, what its document says of it, and the guard around all of them.

Guard ── keys, headers, ids, log ──► router ──► route(request, service)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import minivllm
from minivllm.errors import describe_error

from . import errors, operations
from .errors import ApiError
from .http import cross_site, unknown_routes
from .http.auth import ADMIN as ADMIN_KEY
from .http.auth import ApiKeys, admin_token
from .http.body import Refusal
from .http.guard import Guard, asked_path, contained
from .middleware import around
from .openai import chat, completions, websocket
from .openai.protocol.chat import ChatBody
from .openai.protocol.completion import CompletionBody
from .openai.protocol.tokens import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

    from .openai.generate import Service

AGAIN = "the engine has ended and is started again"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
BODY_ERRORS = (400, 404, 408, 413, 415, 429, 499, 500, 503)
# path, route, method, body, kinds of answer, codes beside those of the guard
Routes = tuple[tuple[str, Callable[..., Any], str, Any, tuple[str, ...], tuple[int, ...]], ...]
ROUTES: Routes = (
    ("/v1/completions", completions.completions, "POST", CompletionBody, (JSON, EVENTS), BODY_ERRORS),
    ("/v1/chat/completions", chat.chat_completions, "POST", ChatBody, (JSON, EVENTS), BODY_ERRORS),
    ("/v1/models", operations.models, "GET", None, (JSON,), (503,)),
    ("/v1/models/{model:path}", operations.model, "GET", None, (JSON,), (404, 503)),
    ("/tokenize", operations.tokenize, "POST", TokenizeBody, (JSON,), BODY_ERRORS),
    ("/detokenize", operations.detokenize, "POST", DetokenizeBody, (JSON,), BODY_ERRORS),
    ("/tokenizer_info", operations.tokenizer_info, "GET", None, (JSON,), (400, 503)),
    ("/version", operations.version, "GET", None, (JSON,), (503,)),
    ("/metrics", operations.prometheus, "GET", None, (TEXT,), (503,)),
)
ADMIN: Routes = (
    ("/start_profile", operations.start_profile, "POST", None, (JSON,), (500, 503)),
    ("/stop_profile", operations.stop_profile, "POST", None, (JSON,), (500, 503)),
    ("/debug/state", operations.debug_state, "GET", None, (JSON,), (500, 503)),
    ("/reset_prefix_cache", operations.reset_prefix_cache, "POST", None, (JSON,), (500, 503)),
)
OPERATORS = frozenset(route for _, route, *_ in ADMIN)
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {
        "error": {
            "type": "object", "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "code": {"type": "integer"},
            },
        }
    },
}  # fmt: skip


class Application:
    """An ASGI application.  ``service`` is None until the engine is there; until then only /health answers, with 503.

    ``reason`` says why there is no engine, or why it takes nothing more; ``admin_token`` is what the routes of
    ``--admin`` want, None where any key will do; with keys it is one of them, for every other route.
    """

    def __init__(
        self, server: ServerConfig, keys: Iterable[str] = (), admin_key: str = "", middleware: Sequence[Any] = ()
    ) -> None:
        self.service: Service | None = None
        self.reason = "the model is loading"
        keys = list(keys)
        self.admin, self.admin_token = server.admin, admin_token(server, keys, admin_key)
        self.told_token = None if self.admin_token == admin_key else self.admin_token  # which nobody knows yet
        keys += [self.admin_token] if keys and self.admin_token is not None else []
        app = FastAPI(
            title="minivllm",
            version=minivllm.__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            openapi_url="/openapi.json",
        )
        for path, route, method, body, kinds, codes in (*ROUTES, *(ADMIN if server.admin else ())):
            app.add_api_route(
                path,
                self._endpoint(route),
                methods=[method],
                response_model=None,
                name=route.__name__,
                response_class=Response,
                responses=_documented(kinds, codes),
                openapi_extra=_documented_input(path, body),
            )
        for path, probe in (("/health", self.health), ("/ready", self.ready)):
            app.add_api_route(
                path,
                probe,
                methods=["GET"],
                response_model=None,
                response_class=Response,
                responses=_documented((JSON,), (503,)),
            )
        app.add_api_websocket_route("/v1/ws", websocket.endpoint(lambda: self.service, ApiKeys(keys)))
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(ApiError, _api_error)
        app.add_exception_handler(Exception, _api_error)  # the framework's own 500 is a word of plain text
        self.guard = Guard(around(app, middleware), ApiKeys(keys), server)
        self.asgi: Any = self.guard
        if server.allowed_origins:
            self.asgi = Cors(
                self.guard,
                allow_origins=server.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-warnings"],
            )
        self.api = app

    def open(self, service: Service) -> None:
        """The engine is there."""
        self.service, self.guard.metrics = service, service.metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await contained(self.asgi, without_slash(scope), receive, send)

    async def health(self, request: Request) -> Response:
        """200 only if the engine stepped or idled in the last 5 seconds."""
        ok, why = (False, self.reason) if self.service is None else self.service.client.healthy()
        again = 0 if self.service is None else self.service.client.restarted
        status = {"status": "ok", **({"restarts": again} if again else {})}
        return (
            JSONResponse(status)
            if ok
            else _answer(_unavailable(why if self.service is None else AGAIN * self.service.client.restarting))
        )

    async def ready(self, request: Request) -> Response:
        """200 if a request would be taken: the model is loaded and nobody has told the server to end."""
        if self.service is not None and self.service.door.closed:
            return _answer(_unavailable("the server is shutting down"))
        return await self.health(request)

    def _endpoint(self, route: Callable[..., Any]) -> Callable[..., Any]:
        """The route; ``scope["state"]["operator"]`` says whether who asks may ask the routes of ``--admin``."""
        held = ApiKeys([] if self.admin_token is None else [self.admin_token])

        async def endpoint(request: Request) -> Any:
            known = held.tenant(dict(request.scope["headers"])) is not None
            request.scope["state"]["operator"] = self.admin and known
            if route in OPERATORS and not known:
                what = (
                    f"want Authorization: Bearer KEY, with {ADMIN_KEY} or the token that the server told at its start"
                )
                raise ApiError(401, what, headers={"WWW-Authenticate": "Bearer"})
            if self.service is None:
                raise _unavailable(self.reason)
            try:
                return await route(request, self.service)
            except ApiError:
                raise
            except Exception as exc:
                error = errors.of(exc)
                if error.status == 500 and route in OPERATORS:  # an operator may know what went wrong inside
                    raise ApiError(500, f"{route.__name__} failed: {describe_error(exc)}") from exc
                if error.status == 500:
                    raise
                raise error from exc

        endpoint.__doc__ = route.__doc__
        return endpoint


class Cors(CORSMiddleware):
    """Starlette's, whose refusals say what to do in the form of every other error."""

    def preflight_response(self, request_headers: Any) -> Response:
        found = super().preflight_response(request_headers)
        if found.status_code < 400:
            return found
        return _answer(cross_site.not_allowed(request_headers.get("origin", ""), bytes(found.body).decode()))


def without_slash(scope: Any) -> Any:
    """Return the scope with its path as routes have it: one slash at the end of a path means nothing."""
    path = scope.get("path", "")
    if not path.endswith("/") or path.endswith("//") or not path[:-1].removeprefix(scope.get("root_path", "")):
        return scope
    raw = scope.get("raw_path")
    return {**scope, "path": path[:-1], **({"raw_path": raw[:-1]} if raw and raw.endswith(b"/") else {})}


def _unavailable(why: str) -> ApiError:
    return ApiError(503, why or "the engine does not answer; the server's log says why", headers={"Retry-After": "5"})


def _answer(error: ApiError) -> Response:
    kind = Refusal if error.status == 413 else JSONResponse
    return kind(error.body(), error.status, error.headers)


async def _api_error(request: Request, exc: Exception) -> Response:
    return _answer(errors.of(exc))


async def _http_error(request: Request, exc: Exception) -> Response:
    """The router's own: no such route, or not by this method."""
    status, headers, path = getattr(exc, "status_code", 500), getattr(exc, "headers", None), asked_path(request.scope)
    if status == 404:
        routes = [route.path for route in request.app.routes if "{" not in route.path and hasattr(route, "methods")]
        return _answer(unknown_routes.missing(path, routes))
    if status == 405:
        return _answer(unknown_routes.refused(request.scope["method"], path, headers))
    return _answer(ApiError(status, str(exc), headers=headers))


def _documented(kinds: Iterable[str], codes: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    good = {kind: {"schema": {"type": "object"} if kind == JSON else {"type": "string"}} for kind in kinds}
    bad = {"description": "an error", "content": {JSON: {"schema": _ERROR}}}
    answers: dict[int | str, dict[str, Any]] = {200: {"description": "the answer", "content": good}}
    return answers | dict.fromkeys(sorted({400, 401, 403, 405, 431, *codes}), bad)


def _documented_input(path: str, body: Any) -> dict[str, Any]:
    if body is None:
        names = re.findall(r"{(\w+)", path)
        one = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        return {"parameters": [{"name": name, **one} for name in names]} if names else {}
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    inner = schema.pop("$defs", {})
    schema = _inline(schema, inner)
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Without references: there are few definitions, and none refers to itself."""
    if isinstance(node, list):
        return [_inline(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(one, definitions) for key, one in node.items()}
