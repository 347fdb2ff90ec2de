"""The routes of the Responses API."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from minivllm.errors import shown
from minivllm.server.errors import ApiError, wrong
from minivllm.server.http.sse import Gone, dump, supervise
from minivllm.server.openai import JsonObject
from minivllm.server.openai.bodies import ResponsesBody
from minivllm.server.openai.generate import Service, read_body, respond, warned
from minivllm.server.openai.limits import seconds_of
from minivllm.server.response_store import StoredResponse

from . import body as bodies
from .background import Job, not_found
from .history import History, checked_id
from .items import listed
from .work import ResponseWork

MOST_LISTED = 100
HEAD = 1024  # number of bytes with the first members of a response, which have no text of a client
JSON = "application/json"


async def create(request: Request, service: Service) -> Any:
    """Return the answer to a conversation as a response, whole or as a stream of events."""
    state = request.scope["state"]
    body = await read_body(request, service, ResponsesBody)
    work = await make_work(service, body, state, history_of(service, state))
    seconds = seconds_of(service, work.body.timeout_s)
    if body.background:
        return await _begin(request, service, work, seconds)
    return await respond(request, service, bool(body.stream), seconds, work)


async def input_tokens(request: Request, service: Service) -> Any:
    """Return the number of tokens of a conversation as ``create`` would send it to the model."""
    state = request.scope["state"]
    body = await read_body(request, service, ResponsesBody)
    work = await make_work(service, body, state, history_of(service, state))
    with bodies.client_names(work.request):
        ids = await work.prompt()
    answer: JsonObject = {"object": "response.input_tokens", "input_tokens": len(ids)}
    if work.warnings:
        answer["warnings"] = work.warnings
    return JSONResponse(answer, headers=warned(work.warnings))


def history_of(service: Service, state: dict[str, Any]) -> History:
    """Return the responses that the client of a request can refer to."""
    return History(service, state["identity"], state["owner"])


async def make_work(service: Service, body: Any, state: dict[str, Any], history: History) -> ResponseWork:
    """Return the work of a parsed body: its checked request, with the conversation that it continues.  ApiError if it
    cannot be served."""
    ident = state["request_id"]
    parsed = bodies.begin(ident, body, listed(body.input, ident))
    if body.previous_response_id is not None:
        previous = await history.previous(checked_id(body.previous_response_id, "previous_response_id"))
        parsed.turns = previous.turns
        earlier = await history.items(previous.turns)
        await parsed.conversation.extend(earlier, "previous_response_id", service.slices)
    parsed.items = await history.resolve(parsed.items)
    await parsed.conversation.extend(parsed.items, "input", service.slices)
    await bodies.read(service, parsed, state["owner"])
    return ResponseWork(service, parsed, state, history)


async def _begin(request: Request, service: Service, work: ResponseWork, seconds: float) -> Response:
    """Start a response in the background and return it.  ApiError (400) with ``stream`` true or ``store`` false."""
    if not work.request.stored or work.request.body.stream:
        field = "stream" if work.request.body.stream else "store"
        expected = "false" if field == "stream" else "true"
        raise ApiError(400, f"{field}: expected {expected} with background=true", field)
    end = time.monotonic() + seconds
    async with AsyncExitStack() as held:
        try:
            answer = await supervise(work.prepare(held), request.receive, service.door, seconds)
        except Gone:
            return Response(status_code=499)  # the client has left, so the status 499 is for the log only
        job = Job(work, answer, held.pop_all(), max(end - time.monotonic(), 0.001))
    service.background.start(request.scope["state"]["identity"], job)
    return Response(dump(job.now()), media_type=JSON, headers=warned(work.warnings))


def _names(request: Request) -> tuple[str, str]:
    """Return the id of the response in a request's path, and the identity of the request's key."""
    ident = request.path_params["response_id"]
    state = request.scope["state"]
    return ident, state["identity"]


async def _found(request: Request, service: Service) -> StoredResponse:
    """Return the stored response of a request's path.  ApiError (404) if there is none."""
    ident, identity = _names(request)
    found = await service.responses.get(identity, ident)
    if found is None:
        raise not_found(ident)
    return found


async def retrieve(request: Request, service: Service) -> Any:
    """Return a stored response, or the present state of one that is generated in the background.  ApiError: 400 for
    ``stream``, 404 if there is none."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise ApiError(400, "stream: expected false, because the events of a response are not stored", "stream")
    ident, identity = _names(request)
    job = service.background.get(identity, ident)
    if job is not None:
        return Response(dump(job.now()), media_type=JSON)
    found = await _found(request, service)
    return Response(found.response, media_type=JSON)


async def delete(request: Request, service: Service) -> Any:
    """Delete a stored response and return its id.  ApiError (404) if there is none."""
    ident, identity = _names(request)
    await service.background.cancel(identity, ident)
    if not await service.responses.delete(identity, ident):
        raise not_found(ident)
    return JSONResponse({"id": ident, "object": "response", "deleted": True})


async def cancel(request: Request, service: Service) -> Any:
    """End a response that is generated in the background, and return it.  ApiError: 404 if there is none, 400 if it is
    not in the background."""
    ident, identity = _names(request)
    job = service.background.get(identity, ident)
    await service.background.cancel(identity, ident)
    found = await _found(request, service)
    if job is None and not _in_background(found):
        raise ApiError(400, "only a response with background=true can be cancelled", "response_id")
    return Response(found.response, media_type=JSON)


def _in_background(stored: StoredResponse) -> bool:
    """Return whether a stored response was generated in the background.

    The field is among the first members of the response, so the rest is not parsed."""
    head = from_json(stored.response[:HEAD], allow_partial=True)
    return head.get("background") is True


async def input_items(request: Request, service: Service) -> Any:
    """Return a page of the items of the conversation that a stored response answers.  ApiError: 400 for a wrong query,
    404 if there is no such response."""
    query = request.query_params
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    number = int(limit) if limit.isdecimal() and len(limit) < 4 else 0
    if not 1 <= number <= MOST_LISTED:
        raise wrong("limit", f"={shown(limit)}: expected 1 to {MOST_LISTED}")
    if order not in ("asc", "desc"):
        raise wrong("order", f"={shown(order)}: expected asc or desc")
    state = request.scope["state"]
    job = service.background.get(state["identity"], request.path_params["response_id"])
    if job is None:
        turns = (await _found(request, service)).turns[:-1]
    else:
        turns = (*job.work.request.turns, dump(job.work.request.items))
    items = await history_of(service, state).items(turns)
    if order == "desc":
        items.reverse()
    page = _page(items, query.get("after"), number)
    return Response(dump(page), media_type=JSON)


def _page(items: list[JsonObject], after: str | None, limit: int) -> JsonObject:
    """Return the items after the item with the id ``after``, at most ``limit``, as a list of OpenAI's API.  ApiError
    (400) if there is no such item."""
    ids = [item.get("id") for item in items]
    if after is not None:
        if after not in ids:
            raise wrong("after", f"={shown(after)}: expected the id of an item of this list")
        start = ids.index(after) + 1
        items = items[start:]
    shown_items = items[:limit]
    page = {"object": "list", "data": shown_items, "has_more": len(items) > limit, "first_id": None, "last_id": None}
    if shown_items:
        page.update(first_id=shown_items[0].get("id"), last_id=shown_items[-1].get("id"))
    return page
