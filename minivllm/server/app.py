"""Build the ASGI application: the routes, their OpenAPI descriptions, the error handlers and the request guard.

request ──► Guard (keys, headers, ids, log) ──► router ──► route(request, service)
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

from . import compat, errors, operations, prefixes, weights
from .anthropic import messages
from .embedding import routes as embedding
from .errors import ApiError
from .http import cross_site, unknown_routes
from .http.auth import ADMIN as ADMIN_KEY
from .http.auth import ApiKeys, admin_token
from .http.body import Refusal
from .http.guard import Guard, contained, error_body, requested_path
from .middleware import around
from .ollama import embed as ollama_embed
from .ollama import generate as ollama
from .ollama import models as ollama_models
from .openai import chat, completions, operator_fields, sockets, websocket
from .openai.bodies import (
    ChatBody,
    CompletionBody,
    CountBody,
    DetokenizeBody,
    EmbedBody,
    LoadAdapterBody,
    MessageBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaModelBody,
    OllamaPromptEmbedBody,
    PauseBody,
    PrefixBody,
    PrefixFileBody,
    RerankBody,
    ResponsesBody,
    ScoreBody,
    SleepBody,
    TemplateBody,
    TokenizeBody,
    UnloadAdapterBody,
    WeightsBody,
)
from .page.files import Page
from .page.live import LiveSocket
from .replicas import routes as replicas
from .responses import routes as responses
from .responses.socket import ResponsesSocket

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

    from .openai.generate import Service

RESTARTING = "the engine has ended and is being restarted"
JSON, EVENTS, LINES, TEXT = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
BODY_ERRORS = (400, 404, 408, 413, 415, 429, 499, 500, 503)
# Columns: path, route, method, model of the body, content types of the answer, status codes of the route's errors.
# The guard's status codes are not listed, because every route has them.
Routes = tuple[tuple[Any, ...], ...]
ROUTES: Routes = (
    ("/v1/completions", completions.completions, "POST", CompletionBody, (JSON, EVENTS), BODY_ERRORS),
    ("/v1/chat/completions", chat.chat_completions, "POST", ChatBody, (JSON, EVENTS), BODY_ERRORS),
    ("/v1/messages", messages.messages, "POST", MessageBody, (JSON, EVENTS), BODY_ERRORS),
    ("/v1/messages/count_tokens", messages.count_tokens, "POST", CountBody, (JSON,), BODY_ERRORS),
    ("/v1/responses", responses.create, "POST", ResponsesBody, (JSON, EVENTS), BODY_ERRORS),
    ("/v1/responses/input_tokens", responses.input_tokens, "POST", ResponsesBody, (JSON,), BODY_ERRORS),
    ("/v1/responses/{response_id}", responses.retrieve, "GET", None, (JSON,), (404, 503)),
    ("/v1/responses/{response_id}", responses.delete, "DELETE", None, (JSON,), (404, 503)),
    ("/v1/responses/{response_id}/cancel", responses.cancel, "POST", None, (JSON,), (404, 503)),
    ("/v1/responses/{response_id}/input_items", responses.input_items, "GET", None, (JSON,), (404, 503)),
    ("/v1/embeddings", embedding.embeddings, "POST", EmbedBody, (JSON,), BODY_ERRORS),
    ("/v1/score", embedding.score, "POST", ScoreBody, (JSON,), BODY_ERRORS),
    ("/score", embedding.score, "POST", ScoreBody, (JSON,), BODY_ERRORS),
    ("/v1/rerank", embedding.rerank, "POST", RerankBody, (JSON,), BODY_ERRORS),
    ("/v2/rerank", embedding.rerank, "POST", RerankBody, (JSON,), BODY_ERRORS),
    ("/rerank", embedding.rerank, "POST", RerankBody, (JSON,), BODY_ERRORS),
    ("/v1/models", operations.models, "GET", None, (JSON,), (503,)),
    ("/v1/models/{model:path}", operations.model, "GET", None, (JSON,), (404, 503)),
    ("/tokenize", operations.tokenize, "POST", TokenizeBody, (JSON,), BODY_ERRORS),
    ("/detokenize", operations.detokenize, "POST", DetokenizeBody, (JSON,), BODY_ERRORS),
    ("/tokenizer_info", operations.tokenizer_info, "GET", None, (JSON,), (400, 503)),
    ("/version", operations.version, "GET", None, (JSON,), (503,)),
    ("/api/chat", ollama.chat, "POST", OllamaChatBody, (JSON, LINES), BODY_ERRORS),
    ("/api/generate", ollama.generate, "POST", OllamaGenerateBody, (JSON, LINES), BODY_ERRORS),
    ("/api/tags", ollama_models.tags, "GET", None, (JSON,), (503,)),
    ("/api/ps", ollama_models.loaded, "GET", None, (JSON,), (503,)),
    ("/api/version", ollama_models.version, "GET", None, (JSON,), (503,)),
    ("/api/show", ollama_models.show, "POST", OllamaModelBody, (JSON,), BODY_ERRORS),
    ("/api/pull", ollama_models.pull, "POST", OllamaModelBody, (JSON, LINES), BODY_ERRORS),
    ("/api/push", ollama_models.unchangeable, "POST", None, (JSON,), (501, 503)),
    ("/api/create", ollama_models.unchangeable, "POST", None, (JSON,), (501, 503)),
    ("/api/copy", ollama_models.unchangeable, "POST", None, (JSON,), (501, 503)),
    ("/api/delete", ollama_models.unchangeable, "DELETE", None, (JSON,), (501, 503)),
    ("/api/embed", ollama_embed.embed, "POST", OllamaEmbedBody, (JSON,), BODY_ERRORS),
    ("/api/embeddings", ollama_embed.embeddings, "POST", OllamaPromptEmbedBody, (JSON,), BODY_ERRORS),
    ("/props", compat.props, "GET", None, (JSON,), (503,)),
    ("/apply-template", compat.apply_template, "POST", TemplateBody, (JSON,), BODY_ERRORS),
    ("/invocations", compat.invocations, "POST", ChatBody, (JSON, EVENTS), BODY_ERRORS),
    ("/load", compat.load, "GET", None, (JSON,), (503,)),
    ("/server_info", compat.server_info, "GET", None, (JSON,), (503,)),
    ("/", ollama_models.root, "GET", None, (TEXT,), (503,)),
    ("/metrics", operations.prometheus, "GET", None, (TEXT,), (503,)),
)
SOCKETS: tuple[tuple[str, type[sockets.Socket]], ...] = (
    ("/v1/ws", websocket.Connection),
    ("/v1/responses", ResponsesSocket),
)
_OPERATIONS: Routes = (
    ("/start_profile", operations.start_profile, "POST"),
    ("/stop_profile", operations.stop_profile, "POST"),
    ("/debug/state", operations.debug_state, "GET"),
    ("/reset_prefix_cache", operations.reset_prefix_cache, "POST"),
    ("/replicas", replicas.show, "GET"),
    ("/replicas/update", replicas.update, "POST"),
    ("/replicas/{number}/drain", replicas.drain, "POST"),
    ("/replicas/{number}/resume", replicas.resume, "POST"),
    ("/cache/prefixes", prefixes.names, "GET"),
    ("/cache/prefixes/{name}", prefixes.drop, "DELETE"),
    ("/cache/verify", prefixes.verify, "POST"),
    ("/weights", weights.show, "GET"),
)
_SAVED: Routes = (
    ("/cache/prefixes", prefixes.save, "POST", PrefixBody),
    ("/cache/prefixes/{name}/export", prefixes.export, "POST", PrefixFileBody),
    ("/cache/import", prefixes.add, "POST", PrefixFileBody),
)
_ADAPTERS: Routes = (
    ("/v1/load_lora_adapter", operations.load_adapter, "POST", LoadAdapterBody, (TEXT,), BODY_ERRORS),
    ("/v1/unload_lora_adapter", operations.unload_adapter, "POST", UnloadAdapterBody, (TEXT,), BODY_ERRORS),
)
_WEIGHTS: Routes = (
    ("/pause", weights.pause, "POST", PauseBody, (JSON,), BODY_ERRORS),
    ("/resume", weights.resume, "POST", None, (JSON,), (400, 503)),
    ("/update_weights", weights.update, "POST", WeightsBody, (JSON,), BODY_ERRORS),
    ("/sleep", weights.sleep, "POST", SleepBody, (JSON,), BODY_ERRORS),
    ("/wake_up", weights.wake, "POST", None, (JSON,), (400, 503)),
)
ADMIN: Routes = (
    *((*operation, None, (JSON,), (500, 503)) for operation in _OPERATIONS),
    *((*operation, (JSON,), BODY_ERRORS) for operation in _SAVED),
    *_ADAPTERS,
    *_WEIGHTS,
)
# columns: path, method name of ``Application``, HTTP method; SageMaker sends its probes to /ping
PROBES = (
    ("/health", "health", "GET"),
    ("/ready", "ready", "GET"),
    ("/ping", "health", "GET"),
    ("/ping", "health", "POST"),
)
OPERATORS = frozenset(route for _, route, *_ in ADMIN)
BODILESS = frozenset(route for _, route, method, body, *_ in ADMIN if method != "GET" and body is None)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object whose properties are all required."""
    return {"type": "object", "required": list(properties), "properties": properties}


_STRING = {"type": "string"}
_PARAM = {"anyOf": [_STRING, {"type": "null"}]}
_FIELDS = _object({"message": _STRING, "type": _STRING, "param": _PARAM, "code": {"type": "integer"}})
_ERROR = _object({"error": _FIELDS})


class Application:
    """The server's ASGI application.

    ``service`` is None until the engine has started.  Until then every route answers 503.
    ``reason`` is the text of that answer.  ``admin_token`` is the key that the operator routes of ``--admin`` require;
    None means that any accepted key opens them.  If the server has API keys, the admin token is one of them.
    ``generated_token`` is the admin token if the server made it up, so that the operator must be informed, else None.
    """

    def __init__(
        self, server: ServerConfig, keys: Iterable[str] = (), admin_key: str = "", middleware: Sequence[Any] = ()
    ) -> None:
        self.service: Service | None = None
        self.reason = "the model is loading"
        keys = list(keys)
        self.admin = server.admin
        self.admin_token = admin_token(server, keys, admin_key)
        self.generated_token = None if self.admin_token == admin_key else self.admin_token
        if keys and self.admin_token is not None:
            keys.append(self.admin_token)
        accepted = ApiKeys(keys, self.admin_token)
        app = FastAPI(
            title="minivllm",
            version=minivllm.__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            openapi_url="/openapi.json",
        )
        self.api = app
        endpoints: list[tuple[Any, ...]] = []
        for path, route, *about in (*ROUTES, *ADMIN) if server.admin else ROUTES:
            endpoints.append((path, self._endpoint(route), *about))
        for path, probe, method in PROBES:
            endpoint = getattr(self, probe)
            endpoints.append((path, endpoint, method, None, (JSON,), (503,)))
        for path, endpoint, method, body, kinds, codes in endpoints:
            app.add_api_route(
                path,
                endpoint,
                methods=[method],
                response_model=None,
                response_class=Response,
                responses=_documented(kinds, codes),
                openapi_extra=_documented_input(path, body),
            )
        page = Page.load() if server.page else None
        live = (("/v1/live", LiveSocket),) if page else ()
        for path, kind in (*SOCKETS, *live):
            socket = sockets.endpoint(lambda: self.service, accepted, kind)
            app.add_api_websocket_route(path, socket)
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(ApiError, _api_error)
        app.add_exception_handler(Exception, _api_error)  # FastAPI would answer 500 with plain text
        inner = app if page is None else page.before(app)
        self.guard = Guard(around(inner, middleware), accepted, server, page=page)
        self.asgi: Any = self.guard
        if server.allowed_origins:
            self.asgi = Cors(
                self.guard,
                allow_origins=server.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "x-warnings"],
            )

    def open(self, service: Service) -> None:
        """Serve requests with a service whose engine has started."""
        self.service = service
        self.guard.metrics = service.metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await contained(self.asgi, without_slash(scope), receive, send)

    async def health(self, request: Request) -> Response:
        """Return 200 if the engine ran a step or was idle within the last 5 seconds, else 503."""
        if self.service is None:
            return _answer(_unavailable(self.reason))
        client = self.service.client
        healthy, _ = client.healthy()
        if not healthy:
            return _answer(_unavailable(RESTARTING if client.restarting else ""))
        return JSONResponse({"status": "ok", **client.health()})

    async def ready(self, request: Request) -> Response:
        """Return 200 if the server accepts requests: the engine is healthy and the server is not shutting down."""
        if self.service is not None and self.service.door.closed:
            return _answer(_unavailable("the server is shutting down"))
        return await self.health(request)

    def _endpoint(self, route: Callable[..., Any]) -> Callable[..., Any]:
        """Return the FastAPI endpoint of a route.

        The endpoint refuses requests to operator routes without the operator's key (401), and all requests while there
        is no engine (503).  It turns other exceptions into ``ApiError``.  It stores in ``scope["state"]["operator"]``
        whether the client may use the operator routes of ``--admin``.
        """
        operator_keys = ApiKeys([] if self.admin_token is None else [self.admin_token])

        async def endpoint(request: Request) -> Any:
            has_key = operator_keys.tenant(dict(request.scope["headers"])) is not None
            request.scope["state"]["operator"] = self.admin and has_key
            if route in OPERATORS and not has_key:
                key = f"the value of {ADMIN_KEY} or the token that the server logged at its start"
                problem = f"expected Authorization: Bearer KEY, where KEY is {key}"
                raise ApiError(401, problem, headers={"WWW-Authenticate": "Bearer"})
            if self.service is None:
                raise _unavailable(self.reason)
            try:
                if route in OPERATORS:
                    operator_fields.check_query(request)
                if route in BODILESS:
                    await operator_fields.check_no_fields(request, self.service)
                return await route(request, self.service)
            except ApiError:
                raise
            except Exception as exc:
                error = errors.of(exc)
                if error.status != 500:
                    raise error from exc
                if route in OPERATORS:  # an operator may read the cause of an internal error
                    raise ApiError(500, f"{route.__name__} failed: {describe_error(exc)}") from exc
                raise

        endpoint.__name__ = route.__name__
        endpoint.__doc__ = route.__doc__
        return endpoint


class Cors(CORSMiddleware):
    """Starlette's CORS middleware, with refusals in the JSON form of all other errors."""

    def preflight_response(self, request_headers: Any) -> Response:
        found = super().preflight_response(request_headers)
        if found.status_code < 400:
            return found
        why = bytes(found.body).decode()
        return _answer(cross_site.not_allowed(request_headers.get("origin", ""), why))


def without_slash(scope: Any) -> Any:
    """Return the scope without the single slash at the end of its path, since routes are declared without it."""
    path = scope.get("path", "")
    if not path.endswith("/") or path.endswith("//"):
        return scope
    if path[:-1] in ("", scope.get("root_path", "")):
        return scope
    found = {**scope, "path": path[:-1]}
    raw = scope.get("raw_path")
    if raw and raw.endswith(b"/"):
        found["raw_path"] = raw[:-1]
    return found


def _unavailable(why: str) -> ApiError:
    return ApiError(
        503, why or ("the engine does not answer; the server's log has the reason"), headers={"Retry-After": "5"}
    )


def _answer(error: ApiError, scope: Any = None) -> Response:
    kind = Refusal if error.status == 413 else JSONResponse
    body = error.body() if scope is None else error_body(error, scope)
    return kind(body, error.status, error.headers)


async def _api_error(request: Request, exc: Exception) -> Response:
    return _answer(errors.of(exc), request.scope)


async def _http_error(request: Request, exc: Exception) -> Response:
    """Return the answer to an error of the router: an unknown path (404) or method (405)."""
    assert isinstance(exc, HTTPException)
    path = requested_path(request.scope)
    error = ApiError(exc.status_code, str(exc), headers=exc.headers)
    if exc.status_code == 404:
        routes = [route.path for route in request.app.routes if hasattr(route, "methods")]
        plain = [route for route in routes if "{" not in route]
        error = unknown_routes.missing(path, plain)
    elif exc.status_code == 405:
        method = request.scope["method"]
        error = unknown_routes.refused(method, path, exc.headers)
    return _answer(error, request.scope)


def _documented(kinds: Iterable[str], codes: Iterable[int]) -> dict[Any, dict[str, Any]]:
    """Return the OpenAPI descriptions of a route's answers, by status code."""
    content = {kind: {"schema": {"type": "object"} if kind == JSON else _STRING} for kind in kinds}
    error = {"description": "an error", "content": {JSON: {"schema": _ERROR}}}
    answers: dict[Any, dict[str, Any]] = {200: {"description": "the answer", "content": content}}
    for code in sorted({400, 401, 403, 405, 431, *codes}):
        answers[code] = error
    return answers


def _documented_input(path: str, body: Any) -> dict[str, Any]:
    """Return the OpenAPI description of a route's body or, without a body model, of the parameters in its path."""
    if body is None:
        names = re.findall(r"{(\w+)", path)
        about = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        return {"parameters": [{"name": name, **about} for name in names]} if names else {}
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    content = {JSON: {"schema": _inline(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Return a JSON schema with each reference replaced by its definition.  No definition refers to itself."""
    if isinstance(node, list):
        return [_inline(element, definitions) for element in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
