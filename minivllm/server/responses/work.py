"""One request for a response: its object, whole or at the end of a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from minivllm.server.errors import ApiError
from minivllm.server.http.sse import EventStream, dump, encode_typed, framed
from minivllm.server.openai import JsonObject, fields
from minivllm.server.openai.answers import Shaper, pieces
from minivllm.server.openai.calls import Part, Thought
from minivllm.server.openai.chat import Chat
from minivllm.server.openai.generate import Answer, Service
from minivllm.server.openai.params import note_default
from minivllm.server.response_store import StoredResponse

from .body import SEALED, ParsedRequest, client_names
from .history import History
from .output import COMPLETED, FAILED, IN_PROGRESS, INCOMPLETE, ResponseOutput, plain_item

if TYPE_CHECKING:
    from minivllm.server.http.connection import Direct
    from minivllm.server.link.scored import Scored
    from minivllm.server.link.streams import TextPiece

PREFIX = "resp_"
NO_INPUT = {"cached_tokens": 0, "cache_write_tokens": 0}
# fields of the body that the response repeats
ECHOED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id",
    "prompt_cache_key", "safety_identifier", "tool_choice", "tools", "top_logprobs", "truncation", "user",
)  # fmt: skip
# default members of a response, without the values of a request
BLANK: JsonObject = {
    "id": "", "object": "response", "created_at": 0, "completed_at": None, "status": "", "background": False,
    "error": None, "incomplete_details": None, "instructions": None, "max_output_tokens": None, "max_tool_calls": None,
    "metadata": {}, "model": "", "output": [], "parallel_tool_calls": True, "previous_response_id": None,
    "prompt_cache_key": None, "reasoning": {}, "safety_identifier": None, "service_tier": "default", "store": True,
    "temperature": None, "text": {}, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": None,
    "truncation": "disabled", "usage": None, "user": None,
}  # fmt: skip


class ResponseEvents:
    """The events of a response as bytes of a stream, with the request."""

    def __init__(self, work: ResponseWork, events: AsyncIterator[bytes]) -> None:
        self.work, self._events = work, events

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    def __anext__(self) -> Awaitable[bytes]:
        return self._events.__anext__()


class ResponseStream(EventStream):
    """The stream of the events of a response."""

    def _final(self, error: ApiError) -> bytes:
        assert isinstance(self.events, ResponseEvents)
        return b"".join(map(encode_typed, self.events.work.failure(error)))


class ResponseWork(Chat):
    """One request for a response.  The response is kept in ``history`` before the client has its end."""

    stream_type: type[EventStream] = ResponseStream
    one_choice = True
    unserved = ("prompt_logprobs", "return_token_ids", "taps", "routes", "echo")

    def __init__(self, service: Service, request: ParsedRequest, state: dict[str, Any], history: History) -> None:
        self.request, self.history = request, history
        with client_names(request):
            super().__init__(service, request.chat, state)
        self.id = PREFIX + request.ident
        top = self.top if request.chat.logprobs else None
        self.output = ResponseOutput(request.ident, request.tools, self.speller, top, SEALED in request.include)
        self.warnings = [*request.warnings, *request.conversation.warnings, *self.warnings]
        del self.warnings[fields.MOST :]
        for warning in self.warnings:
            warning.update({key: request.renamed(text) for key, text in warning.items()})
        self.in_pieces = self.in_pieces or top is not None
        self.created = int(time.time())

    async def prepare(self, held: AsyncExitStack) -> Answer:
        """Return the answer, with the stream of the request open; ``held`` closes it."""
        with client_names(self.request):
            answer = await super().prepare(held)
        answer.id = self.id
        return answer

    def response(self, status: str, **members: Any) -> JsonObject:
        """Return the response object with a status.  ``members`` are further members."""
        body, params = self.request.body, self.params
        reasoning, text = body.reasoning or {}, body.text or {}
        found: JsonObject = {
            **BLANK,
            "id": self.id,
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "store": self.request.stored,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "parallel_tool_calls": self.tools.parallel,
        }
        for name in ECHOED:
            value = getattr(body, name)
            if value is not None:
                found[name] = value
        found["reasoning"] = {"effort": reasoning.get("effort"), "summary": None}
        found["text"] = {"format": self.request.form, "verbosity": text.get("verbosity") or "medium"}
        if status == COMPLETED:
            found["completed_at"] = int(time.time())
        found.update(members)
        if self.warnings:
            found["warnings"] = self.warnings
        return found

    def _end(self, answer: Answer) -> JsonObject:
        """Return the response of a complete answer.  ApiError (503) if the server has ended it."""
        output = self.output
        members: JsonObject = {"output": output.items, "usage": self._usage(answer)}
        if output.status == INCOMPLETE:
            members["incomplete_details"] = {"reason": "max_output_tokens"}
            if self.requested is None:
                note_default(answer, self.default)
        elif output.status == FAILED:
            raise ApiError(503, "the server has ended the answer")
        return self.response(output.status, **members)

    def _usage(self, answer: Answer) -> JsonObject:
        """Return the token counts of a complete answer."""
        counts = answer.usage()
        thought = min(round(self.output.thought), counts["completion_tokens"])
        details = counts.get("completion_tokens_details") or {"reasoning_tokens": thought}
        usage: JsonObject = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**NO_INPUT, **counts["prompt_tokens_details"]},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": details,
            "total_tokens": counts["total_tokens"],
        }
        if "energy" in counts:
            usage["energy"] = counts["energy"]
        return usage

    def failure(self, error: ApiError) -> Iterator[JsonObject]:
        """Yield the last events of a stream that has failed."""
        about = _failure(error)
        yield self.output.event("error", **about, param=error.body()["error"]["param"])
        failed = self.response(FAILED, error=about, output=self.output.finished())
        yield self.output.event("response.failed", response=failed)

    async def steps(self, answer: Answer) -> AsyncIterator[Iterator[JsonObject]]:
        """Yield the events of each piece of the answer, without the events at its beginning and end."""
        output = self.output
        async for parts, piece in self.piece_parts(answer):
            output.add_scores(text_scores(piece))
            output.thought += _thought_tokens(parts, len(piece.token_ids))
            yield output.feed(parts)

    async def _collect(self, answer: Answer) -> None:
        """Read the answer to its end."""
        async for events in self.steps(answer):
            for _ in events:
                pass

    def opening_events(self) -> Iterator[JsonObject]:
        """Yield the first events of a stream."""
        for kind in ("response.created", "response.in_progress"):
            yield self.output.event(kind, response=self.response(IN_PROGRESS))

    async def json_events(self, answer: Answer) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the type and the JSON of each event.  The last event has the whole response."""
        slices = self.service.slices
        until = slices.begin()
        for event in self.opening_events():
            yield event["type"], dump(event)
        async for events in self.steps(answer):
            for event in events:
                yield event["type"], await self._json(event, answer)
                if time.perf_counter() > until:
                    until = await slices.next()
        whole = await self._json(self._end(answer), answer)
        await self._keep(whole)
        last = self.output.event(f"response.{self.output.status}")
        yield last["type"], dump(last)[:-1] + b',"response":' + whole + b"}"

    async def idle_events(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the events of a response without an answer, which a later request continues."""
        for event in self.opening_events():
            yield event["type"], dump(event)
        self.output.status = COMPLETED
        usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        details = {"input_tokens_details": NO_INPUT, "output_tokens_details": {"reasoning_tokens": 0}}
        made = self.response(COMPLETED, usage={**usage, **details})
        await self._keep(dump(made))
        yield "response.completed", dump(self.output.event("response.completed", response=made))

    async def finish(self, answer: Answer) -> None:
        """Generate the response and keep it."""
        await self._collect(answer)
        await self._keep(await self._json(self._end(answer), answer))

    async def keep_failed(self, status: str, error: ApiError | None) -> None:
        """Keep a response that has ended early."""
        about = None if error is None else _failure(error)
        await self._keep(dump(self.response(status, error=about, output=self.output.finished())))

    async def _keep(self, whole: bytes) -> None:
        """Keep the response for later requests, if a request may refer to it.  ``whole`` is its JSON."""
        if not self.request.stored and self.history.local is None:
            return  # a response that is not stored cannot be referenced by a later request
        turns = [dump(self.request.items), dump([plain_item(item) for item in self.output.items])]
        stored = StoredResponse(self.id, whole, (*self.request.turns, *turns))
        await self.history.keep(stored, self.request.stored)

    async def _json(self, value: JsonObject, answer: Answer) -> bytes:
        """Return an event or a response as JSON."""
        if self.output.top is None:
            return dump(value)
        return b"".join([piece async for piece in self._pieces(value)])

    def _pieces(self, value: JsonObject) -> AsyncIterator[bytes]:
        """Yield a value with log-probabilities as JSON, in pieces."""
        tokens = self.service.tokens
        shaper = Shaper(tokens.pool, tokens.tokenizer, self.speller, self.state["owner"])
        return pieces(value, shaper, self.service.slices)

    def events(self, answer: Answer, direct: Direct | None = None) -> AsyncIterator[bytes]:
        """Return the answer as server-sent events."""
        return ResponseEvents(self, self._events(answer))

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events.  An error of the engine becomes the last events."""
        try:
            async for kind, data in self.json_events(answer):
                yield framed(kind, data)
        except ApiError as error:
            self.state["log"]["error"] = error.status
            await self.keep_failed(FAILED, error)
            yield b"".join(map(encode_typed, self.failure(error)))

    async def written(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the response as JSON, in pieces.  The last piece comes after the response was kept."""
        await self._collect(answer)
        held: list[bytes] = []
        async for piece in self._pieces(self._end(answer)):
            if held:
                yield held[-1]
            held.append(piece)
        await self._keep(b"".join(held))
        yield held[-1]


def _failure(error: ApiError) -> JsonObject:
    """Return the error of a response that has failed."""
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
    return {"code": code, "message": error.body()["error"]["message"]}


def _thought_tokens(parts: list[Part], tokens: int) -> float:
    """Return how many tokens of a piece are reasoning, by its share of the characters."""
    texts = [part.text for part in parts if hasattr(part, "text")]
    thoughts = [part.text for part in parts if isinstance(part, Thought)]
    total = sum(map(len, texts))
    return tokens * sum(map(len, thoughts)) / total if total else 0.0


def text_scores(piece: TextPiece) -> Scored | None:
    """Return the log-probabilities of the tokens of a piece, without the token that ended the answer; None if the piece
    has none.

    That token has no text.  It arrives alone or together with the last text, and must not change the answer."""
    scored = piece.logprobs
    ended_by_token = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str)
    if scored is None or not len(scored) or not ended_by_token:
        return scored
    return scored.cut(0, len(scored) - 1)
