"""``GET /v1/models`` in the form of Anthropic's API, for clients that send the header ``anthropic-version``."""

from __future__ import annotations

from datetime import datetime, timezone

from starlette.requests import Request

from minivllm.server.errors import ApiError
from minivllm.server.openai import JsonObject
from minivllm.server.openai.generate import Service

LIMIT, MOST = 20, 1000  # default and largest number of models on a page


def is_meant(request: Request) -> bool:
    """Return whether a client expects the form of Anthropic's API."""
    return "anthropic-version" in request.headers


def card(service: Service, name: str) -> JsonObject:
    """Return the description of the model under one of its names."""
    created = datetime.fromtimestamp(service.created, timezone.utc)
    length = service.client.info.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def page(request: Request, service: Service) -> JsonObject:
    """Return a page of the served names, as the query of the request selects it.  ApiError (400) for a wrong query."""
    query = request.query_params
    limit = query.get("limit", str(LIMIT))
    if not limit.isdecimal() or not 1 <= int(limit[:6]) <= MOST:
        raise ApiError(400, f"limit={limit[:24]!r}: expected a whole number from 1 to {MOST}", "limit")
    names = list(service.names)
    if "after_id" in query:
        names = names[_place(names, "after_id", query["after_id"]) + 1 :]
    if "before_id" in query:
        names = names[: _place(names, "before_id", query["before_id"])]
        shown = names[-int(limit) :]
    else:
        shown = names[: int(limit)]
    return {
        "data": [card(service, name) for name in shown],
        "has_more": len(shown) < len(names),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def _place(names: list[str], field: str, name: str) -> int:
    """Return the index of the served name ``name`` in ``names``.  ApiError (400) for a name that is not served."""
    if name not in names:
        raise ApiError(400, f"{field}={name[:64]!r}: expected the name of a served model", field)
    return names.index(name)
