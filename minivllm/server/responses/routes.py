"""The routes of the Responses API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from minivllm.server.openai.bodies import ResponsesBody
from minivllm.server.openai.generate import Service, read_body, respond
from minivllm.server.openai.limits import seconds_of

from . import body as bodies
from .items import listed
from .work import ResponseWork


async def create(request: Request, service: Service) -> Any:
    """Answer a conversation as a response, whole or as a stream of events."""
    state = request.scope["state"]
    body = await read_body(request, service, ResponsesBody)
    work = await make_work(service, body, state)
    seconds = seconds_of(service, work.body.timeout_s)
    return await respond(request, service, bool(body.stream), seconds, work)


async def make_work(service: Service, body: Any, state: dict[str, Any]) -> ResponseWork:
    """Return the request of a body.  ApiError if it cannot be served."""
    ident = state["request_id"]
    asked = bodies.begin(ident, body, listed(body.input, ident))
    await asked.conversation.extend(asked.items, "input", service.slices)
    await bodies.read(service, asked, state["owner"])
    return ResponseWork(service, asked, state)
