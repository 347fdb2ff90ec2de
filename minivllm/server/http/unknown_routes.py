"""Answer requests for unknown routes with the route to use instead.

Many clients were written for other servers, or have a base URL without /v1 or with /v1 twice.  They show their user
only the message of an error, so the message has to contain the advice.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from minivllm.server.errors import ApiError, printable

CHAT, COMPLETIONS, MODELS = "POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"
MESSAGES = "POST /v1/messages"
EMBEDDINGS, SCORE = "POST /v1/embeddings", "POST /v1/score"
ALL = f"use {CHAT}, {COMPLETIONS} or {MODELS}"
LIKE = 0.8  # least difflib similarity for which a route is suggested, such as for /v1/chat/completion
LONGEST = 128  # largest number of characters of a path that is compared with the routes
# advice <- ends of paths that other servers have; * stands for one part of a path
_OTHERS = f"""\
batches of messages are not stored; use {MESSAGES} for each request <- messages/batches messages/batches/* \
    messages/batches/*/cancel messages/batches/*/results
use {EMBEDDINGS} <- embed embedding
only embeddings are pooled; use {EMBEDDINGS} <- pooling encode
this server has no classifier; use {SCORE} for the similarity of texts <- classify
only text is generated; use {CHAT} <- audio/transcriptions audio/translations audio/speech images/generations \
    images/edits moderations
files and batches are not stored: minivllm run-batch runs a batch file; use {CHAT} for each request <- files \
    files/* batches batches/* fine_tuning/jobs assistants threads vector_stores
models are loaded when the server starts; {MODELS} names them <- load_lora_adapter unload_lora_adapter models/load \
    models/unload
use {COMPLETIONS} <- completion generate generate_stream infer inference infill api/v1/generate \
    api/extra/generate/stream v2/models/*/infer
use GET /tokenizer_info, and {MODELS} for the context's length <- info get_model_info api/v1/model
use GET /server_info <- get_server_info
use GET /debug/state, with --admin <- slots
this route is a WebSocket: use ws:// or wss:// <- v1/ws
use GET /metrics <- get_load stats
use POST /reset_prefix_cache, with --admin <- flush_cache
use GET /health <- healthz livez health_generate api/health v2/health/live
use GET /ready <- readyz health/ready v2/health/ready
use GET /openapi.json, which describes the routes <- docs redoc swagger.json
"""


def _rows(text: str) -> list[tuple[re.Pattern[str], str]]:
    """Return (pattern, advice) for each path of the table.  The pattern matches all paths that end with it."""
    rows = []
    for line in text.splitlines():
        advice, paths = line.split(" <- ")
        for path in paths.split():
            pattern = re.escape(path).replace(r"\*", "[^/]+")
            rows.append((re.compile("(/.*)?/" + pattern), advice))
    return rows


OTHERS = _rows(_OTHERS)


def missing(path: str, routes: Iterable[str]) -> ApiError:
    """Return the error 404 for a path that is none of ``routes``, with advice on the route to use instead."""
    return ApiError(404, f"there is no route {printable(path, 80)}: {_instead(path, list(routes))}")


def refused(method: str, path: str, headers: Mapping[str, str] | None) -> ApiError:
    """Return the error 405 for a route that does not accept the request's method."""
    allowed = (headers or {}).get("Allow", "another method")
    problem = f"the route {printable(path, 80)} does not accept {printable(method, 16)}; expected {allowed}"
    return ApiError(405, problem, headers=headers)


def _instead(path: str, routes: Sequence[str]) -> str:
    """Return the advice for a path that is none of the routes: the route to use, the most similar one, or the list of
    all."""
    plain = "/" + "/".join(part for part in path.split("/") if part)
    tail = plain.rpartition("/v1/")[2]
    if len(plain) > LONGEST or plain in ("/", "/v1"):
        return ALL
    if plain in routes:
        return f"use {plain}"
    if f"/v1/{tail}" in routes and "/v1/" in plain:
        return f"use /v1/{tail}: the base URL is the server's address and /v1, once"
    if plain.removeprefix("/v1") in routes:
        return f"use {plain.removeprefix('/v1')}"
    if f"/v1{plain}" in routes:
        return f"use /v1{plain}: the base URL ends with /v1"
    listed = next((advice for pattern, advice in OTHERS if pattern.fullmatch(plain)), "")
    of_ollama = plain.startswith("/api/") and plain.count("/") == 2
    if listed and of_ollama:  # the names of Ollama's routes are short, so many other names are similar to them
        return listed
    alike = [route for route in routes if route.startswith("/api/") == of_ollama]
    if near := difflib.get_close_matches(plain, alike, n=1, cutoff=LIKE):
        return f"did you mean {near[0]}?"
    if listed:
        return listed
    for end, route in (("/chat/completions", CHAT), ("/completions", COMPLETIONS)):  # Azure's, and /v1/engines/NAME
        if plain.endswith(end):
            return f"use {route}, with the model in the body"
    return ALL
