"""Requests for routes that are not here: what to ask instead.

Clients are written for other servers, or with a base URL that lacks /v1 or has it twice, and show nobody more of an
answer than its message.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from minivllm.server.errors import ApiError, printable

CHAT, COMPLETIONS, MODELS = "POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"
ALL = f"ask {CHAT}, {COMPLETIONS} or {MODELS}"
LIKE = 0.8  # of difflib: /v1/chat/completion is near enough to /v1/chat/completions
LONGEST = 128  # characters of a path that is compared with others
# what to ask instead <- paths, as they end, of other servers: * is a part of a path
_OTHERS = f"""\
Anthropic's API is not served; {CHAT} is <- messages messages/count_tokens
OpenAI's Responses are not served; {CHAT} is <- responses responses/*
only text is generated; {CHAT} is served <- embeddings embed embedding rerank score pooling classify \
    audio/transcriptions audio/translations audio/speech images/generations images/edits moderations api/embed \
    api/embeddings
nothing is kept on this server; ask {CHAT} for each <- files files/* batches batches/* fine_tuning/jobs assistants \
    threads vector_stores
models are loaded when the server starts; {MODELS} names them <- load_lora_adapter unload_lora_adapter api/pull \
    api/create api/delete api/push api/copy models/load models/unload
Ollama's API is not served; {CHAT} is <- api/chat
Ollama's API is not served; {COMPLETIONS} is <- api/generate
Ollama's API is not served; {MODELS} is <- api/tags api/show api/ps
Ollama's API is not served; GET /version is <- api/version
here it is {COMPLETIONS} <- completion generate generate_stream infer inference invocations infill api/v1/generate \
    api/extra/generate/stream v2/models/*/infer
here it is POST /tokenize with {{"messages": [...]}}, and POST /detokenize for the text <- apply-template
here it is GET /tokenizer_info, and {MODELS} for the context's length <- props info get_model_info get_server_info \
    server_info api/v1/model
here it is GET /debug/state, with --admin <- slots
here it is a WebSocket: ws:// or wss:// <- v1/ws
here it is GET /metrics <- load get_load stats
here it is POST /reset_prefix_cache, with --admin <- flush_cache
here it is GET /health <- ping healthz livez health_generate api/health v2/health/live
here it is GET /ready <- readyz health/ready v2/health/ready
here it is GET /openapi.json, which describes the routes <- docs redoc swagger.json
"""


def _rows(text: str) -> list[tuple[re.Pattern[str], str]]:
    pairs = (line.split(" <- ") for line in text.splitlines())
    rows = ((path, why) for why, paths in pairs for path in paths.split())
    return [(re.compile("(/.*)?/" + re.escape(path).replace(r"\*", "[^/]+")), why) for path, why in rows]


OTHERS = _rows(_OTHERS)


def missing(path: str, routes: Iterable[str]) -> ApiError:
    """404 for a path that is none of ``routes``, with what to ask instead."""
    return ApiError(404, f"there is no route {printable(path, 80)}: {_instead(path, list(routes))}")


def refused(method: str, path: str, headers: Mapping[str, str] | None) -> ApiError:
    """405: the route is there, but not by this method."""
    allowed = (headers or {}).get("Allow", "another method")
    what = f"the route {printable(path, 80)} does not take {printable(method, 16)}; want {allowed}"
    return ApiError(405, what, headers=headers)


def _instead(path: str, routes: Sequence[str]) -> str:
    plain = "/" + "/".join(part for part in path.split("/") if part)
    tail = plain.rpartition("/v1/")[2]
    if len(plain) > LONGEST or plain in ("/", "/v1"):
        return ALL
    if plain in routes:
        return f"want {plain}"
    if f"/v1/{tail}" in routes and "/v1/" in plain:
        return f"want /v1/{tail}: the base URL is the server's address and /v1, once"
    if plain.removeprefix("/v1") in routes:
        return f"want {plain.removeprefix('/v1')}"
    if f"/v1{plain}" in routes:
        return f"want /v1{plain}: the base URL ends with /v1"
    if near := difflib.get_close_matches(plain, routes, n=1, cutoff=LIKE):
        return f"did you mean {near[0]}?"
    for form, why in OTHERS:
        if form.fullmatch(plain):
            return why
    for name, ask in (("/chat/completions", CHAT), ("/completions", COMPLETIONS)):  # Azure's, and /v1/engines/NAME
        if plain.endswith(name):
            return f"here it is {ask}, with the model in the body"
    return ALL
