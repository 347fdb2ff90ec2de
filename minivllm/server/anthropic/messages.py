"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API over the chats of this server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from minivllm.runtime.text.thinking import tags_of
from minivllm.server.errors import MESSAGES, ApiError
from minivllm.server.http.sse import EventStream, dump, encode_typed
from minivllm.server.openai import JsonObject
from minivllm.server.openai.bodies import ChatBody, CountBody, MessageBody
from minivllm.server.openai.calls import Finished, Part
from minivllm.server.openai.chat import Chat
from minivllm.server.openai.fields import MOST, warn
from minivllm.server.openai.generate import Answer, Service, checked, read_body, respond, warned
from minivllm.server.openai.limits import seconds_of
from minivllm.server.openai.reasoning import BUDGET

from .blocks import ContentBlocks
from .translate import BETA, ChatValues, translate

if TYPE_CHECKING:
    from minivllm.server.http.connection import Direct


PING = encode_typed({"type": "ping"})


async def messages(request: Request, service: Service) -> Any:
    """Return the answer to a conversation in the form of Anthropic's Messages API, whole or as a stream."""
    work = await _work(request, service, MessageBody)
    return await respond(request, service, bool(work.body.stream), seconds_of(service, work.body.timeout_s), work)


async def count_tokens(request: Request, service: Service) -> Any:
    """Return the number of tokens of the prompt that a message would have."""
    work = await _work(request, service, CountBody)
    answer: JsonObject = {"input_tokens": len(await work.prompt())}
    if work.warnings:
        answer["warnings"] = work.warnings
    return Response(dump(answer), media_type=work.media_type, headers=warned(work.warnings))


async def _work(request: Request, service: Service, model: type[Any]) -> Messages:
    """Read the body of a request, translate it to a chat, and return its work.  A body that only counts tokens becomes
    a chat of one token."""
    body = await read_body(request, service, model)
    tokenizer = service.tokens.tokenizer
    bounds = BUDGET in service.client.info.reads and tokenizer is not None and tags_of(tokenizer) is not None
    translation = translate(body, bounds, service.images.reads)
    await asyncio.sleep(0)  # reading a large conversation takes some milliseconds, so other requests run first
    if model is CountBody:
        translation.values["max_tokens"] = 1
    if request.headers.get("anthropic-beta"):
        warn(translation.warnings, "anthropic-beta", BETA)
    state = request.scope["state"]
    chat = await checked(service, ChatBody, translation.values, state["owner"], translation.sent)
    return Messages(service, chat, state, translation)


class MessageStream(EventStream):
    """The stream of the events of a message."""

    comment = PING
    _request_id = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._request_id = scope["state"]["echoed"]
        await super().__call__(scope, receive, send)

    def _final(self, error: ApiError) -> bytes:
        """Return the event of an error in the middle of a stream."""
        return encode_typed(error.body(MESSAGES, self._request_id))


class Messages(Chat):
    """One request for a message."""

    stream_type: type[EventStream] = MessageStream
    one_choice = True
    unserved = ("logprobs", "prompt_logprobs", "return_token_ids", "taps", "routes", "include_energy", "echo")

    def __init__(self, service: Service, body: Any, state: dict[str, Any], translation: ChatValues) -> None:
        super().__init__(service, body, state)
        self.warnings[:0] = translation.warnings
        del self.warnings[MOST:]
        self.shows_thoughts = translation.shows_thoughts
        # As in Anthropic's API, the end of the context may end an answer before max_tokens, so the value is treated as
        # a default that may be reduced.
        self.most = self.default = self.requested
        self.requested = None
        if self.most is not None and self.params.min_tokens > self.most:
            text = f"min_tokens={self.params.min_tokens}: expected at most max_tokens={self.most}"
            raise ApiError(400, text, "min_tokens")

    async def prepare(self, held: AsyncExitStack) -> Answer:
        """Return the answer, with the stream of the request open; ``held`` closes it."""
        answer = await super().prepare(held)
        answer.id = f"msg_{self.state['request_id']}"
        return answer

    async def events(self, answer: Answer, direct: Direct | None = None) -> AsyncIterator[bytes]:
        """Yield the events of the message.  The first piece of the answer has the counts of the prompt."""
        blocks = ContentBlocks(self.shows_thoughts)
        events: list[JsonObject] = []
        begun = False
        async for parts in self.parts(answer):
            events = [*blocks.events(parts)]
            if not begun:
                begun = True
                yield encode_typed({"type": "message_start", "message": self._begin(answer)}) + PING
            finished = parts[-1] if parts else None
            if isinstance(finished, Finished):
                events += blocks.finish()
                events += self._end(answer, blocks, finished)
            if events:
                yield b"".join(map(encode_typed, events))

    async def written(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the JSON of the whole message once it is complete, for a request without ``stream``."""
        blocks = ContentBlocks(self.shows_thoughts)
        parts: Sequence[Part] = ()
        async for parts in self.parts(answer):
            list(blocks.events(parts))
        finished = parts[-1]
        assert isinstance(finished, Finished)
        list(blocks.finish())
        reason, sequence = self._stop(answer, blocks, finished)
        message = self._begin(answer)
        message.update(content=blocks.content(), stop_reason=reason, stop_sequence=sequence, usage=_usage(answer, None))
        yield dump(message)

    def _begin(self, answer: Answer) -> JsonObject:
        """Return the message before its first block."""
        message: JsonObject = {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(answer, answer.sent),
        }
        if answer.warnings:
            message["warnings"] = answer.warnings
        return message

    def _end(self, answer: Answer, blocks: ContentBlocks, finished: Finished) -> list[JsonObject]:
        """Return the events after the last block."""
        reason, sequence = self._stop(answer, blocks, finished)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            {"type": "message_delta", "delta": delta, "usage": _usage(answer, None)},
            {"type": "message_stop"},
        ]

    def _stop(self, answer: Answer, blocks: ContentBlocks, finished: Finished) -> tuple[str, str | None]:
        """Return the stop reason of a message, and the stop string that ended it (None if none did).  ApiError (503) if
        the engine has aborted the request."""
        if finished.reason == "abort":
            raise ApiError(503, "the engine has aborted the request")
        if finished.reason == "length":
            most = answer.streams[0].params.max_tokens
            cut = self.most is not None and most is not None and most < self.most
            return "model_context_window_exceeded" if cut else "max_tokens", None
        if blocks.called:
            return "tool_use", None
        if isinstance(finished.stop, str):
            return "stop_sequence", finished.stop
        return "end_turn", None


def _usage(answer: Answer, sent: int | None) -> JsonObject:
    """Return the token counts of a message.  ``sent`` is that of ``Answer.usage``."""
    counts = answer.usage(sent)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }
