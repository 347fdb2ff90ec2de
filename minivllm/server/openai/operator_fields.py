"""Read the bodies and query strings of operator routes, and refuse unknown names.

The same routes of other servers have further fields.  To ignore such a field would be dangerous: a pause with
``mode=abort`` would keep the requests.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from minivllm.errors import shown

from ..errors import ApiError
from . import fields
from .generate import Service, checked, read_body, read_values

# path: the parameters of its query string
QUERIES = {"/debug/state": ("trim",), "/sleep": ("level",)}
WITHOUT_EFFECT = ("lora_int_id",)  # of vLLM's clients, which send an adapter's name too
DOCUMENTED = "/openapi.json describes the fields of each route"


def check_query(request: Request) -> None:
    """Raise ApiError (400) for a parameter in the query string that the route does not read."""
    read = QUERIES.get(request.url.path.rstrip("/"), ())
    for name in request.query_params:
        if name not in read:
            _refuse(name, f"the query string of this route takes {' and '.join(read) or 'no parameters'}")


async def check_no_fields(request: Request, service: Service) -> None:
    """Raise ApiError (400) for a body with fields.  Call it for routes without a body."""
    if not _is_empty(request):
        for name, value in (await read_values(request, service)).items():
            if value:
                _refuse(name, "this route takes no fields")


async def read_operation(request: Request, service: Service, model: type[Any], optional: bool = False) -> Any:
    """Return the body of a request.  ``optional`` accepts a request without a body.

    ApiError (400) for an unknown field, unless its value is null, false or empty."""
    if optional and _is_empty(request):
        body = await checked(service, model, {}, request.scope["state"]["owner"])
    else:
        body = await read_body(request, service, model)
    fields.check(body)
    for name, value in (body.model_extra or {}).items():
        if value and name not in WITHOUT_EFFECT:
            _refuse(name, f"expected {', '.join(model.model_fields)}")
    return body


def _is_empty(request: Request) -> bool:
    """Return whether a request has no body."""
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers


def _refuse(name: str, expected: str) -> None:
    raise ApiError(400, f"{shown(name[:64])} is not read here: {expected}; {DOCUMENTED}", name[:64])
