"""``POST /v1/chat/completions``: an answer to a conversation, whole or as a stream, with calls of tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from minivllm.runtime.text import messages as plain
from minivllm.server.errors import ApiError

from . import fields, logprobs, tools
from .answers import TokenScores
from .bodies import ChatBody, named, naming, sent_names
from .generate import (
    SCORES,
    TEXT,
    Answer,
    Service,
    check_branches,
    check_cost,
    check_counts,
    open_streams,
    read_body,
    respond,
    seconds_of,
)
from .params import asked_tokens, fit, limited, make_params, note_default, whole_form
from .prompts import answer_role, begins_answer, last_content, truncated, truncation
from .reader import Reader, end_of_calls
from .taps import check_reads, read_taps
from .usage import asks_energy, stream_options

if TYPE_CHECKING:
    from minivllm.runtime.tenant_cache import Salt
    from minivllm.server.link.client import TextPiece

MOST_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


async def chat_completions(request: Request, service: Service) -> Any:
    body = await read_body(request, service, ChatBody)
    work = Chat(service, body, request.scope["state"])
    return await respond(request, service, bool(body.stream), seconds_of(service, body.timeout_s), work)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a checked copy of a conversation.  ApiError or RequestError (400) names the place that is wrong."""
    if isinstance(messages, list) and len(messages) > MOST_MESSAGES:
        raise ApiError(400, f"messages: {len(messages)} of them; want at most {MOST_MESSAGES}", "messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(message, dict) and role not in ROLES:
            place = f"messages[{number}].role"
            raise ApiError(400, f"{place}={str(role)[:40]!r}: want one of {', '.join(ROLES)}", place)
    return plain.check_messages(messages)


def _warn_unread(service: Service, messages: Any, warnings: list[dict[str, str]]) -> None:
    """Warn of keys of messages that no chat template mentions."""
    tokenizer = service.tokens.tokenizer
    sources = [] if tokenizer is None else list(tokenizer.chat_templates.values())
    for place in plain.unread(messages, lambda key: any(key in source for source in sources)):
        if len(warnings) < fields.MOST:
            warnings.append({"field": place, "message": f"{place} has no effect here: no chat template reads it"})


class Chat:
    """One request; ``state`` has its ids, tenant and what is to be logged of it."""

    tells_empty = False

    @naming
    def __init__(self, service: Service, body: ChatBody, state: dict[str, Any]) -> None:
        self.service, self.body, self.state = service, body, state
        self.passed, self.warnings = fields.check(body, service.client.info.reads)
        self.model = service.check_model(body.model)
        self.usage, self.energy = stream_options(body), asks_energy(service, body)
        self.n = 1 if body.n is None else body.n
        check_counts(service, body.n)
        self.messages = check_messages(body.messages)
        _warn_unread(service, self.messages, self.warnings)
        self.role, self.echoed = answer_role(self.messages, body), last_content(self.messages, body)
        self.tools = tools.read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: want it only with logprobs=true", "top_logprobs")
        self.asked = limited(asked_tokens(body), service.most_tokens, self.warnings, sent_names(body))
        self.default: int | None = service.defaults.get("max_tokens")
        self.kept = truncation(body, self.asked or self.default, service.client.info.max_model_len)
        self.top = body.top_logprobs or 0
        form = whole_form(body, self.tools)
        self.params = make_params(
            body,
            self.passed,
            self.top if body.logprobs else None,
            form,
            self.state,
            service.client.info,
            service.server,
            service.defaults,
        )
        self.taps = read_taps(body.taps, self.state, service.server, self.params)
        self.silent: Mapping[str, Any] = {"delta": {}}
        check_branches(service, 1, self.params)
        check_reads(self.taps, service.client.info.tap_points, 1, self.params)
        as_ids = bool(body.return_tokens_as_token_ids)
        self.speller = logprobs.Speller(service.tokens.tokenizer, as_ids, self.params.detokenize)

    async def prepare(self, held: AsyncExitStack) -> Answer:
        service = self.service
        held.enter_context(service.door.enter(1, self.state["owner"]))
        with named(sent_names(self.body)):
            ids = await render(
                service, self.messages, self.tools.shown, self.body, self.params.salt, self.state["owner"]
            )
            ids = truncated(ids, self.kept, self.body.truncation_side)
            most = fit(self.params, self.asked, len(ids), service.client.info, self.default)
            asks = [(ids, self.params.ending_after(most))]
            check_cost(service, asks, self.asked is None and self.default is None)
            until = end_of_calls(self.tools, tools.parser_of(service.server.tool_parser))
            pieces = bool(self.body.stream) or until is not None
            streams = await open_streams(service, held, self.state, asks, pieces, self.taps, self.energy)
        if until is not None:
            streams[0].end_when(until)
        object = "chat.completion.chunk" if self.body.stream else "chat.completion"
        return Answer(
            service,
            f"chatcmpl-{self.state['request_id']}",
            object,
            self.model,
            streams,
            self.n,
            *self.usage,
            self.warnings,
            {"prompt_token_ids": ids} if self.body.return_token_ids else {},
            reads=self.taps.reads,
            energy=self.energy,
        )

    def _reader(self) -> Reader:
        return Reader(self.tools, tools.parser_of(self.service.server.tool_parser))

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        self._readers = [self._reader() for _ in range(self.n)]
        deltas = [{"role": self.role, "content": ""}]
        if self.echoed:
            deltas.append({"content": self.echoed})
        rest = {"logprobs": None, "finish_reason": None}
        return [{"index": i, "delta": delta, **rest} for delta in deltas for i in range(self.n)]

    def choices(self, answer: Answer, number: int, piece: TextPiece) -> Iterator[dict[str, Any]]:
        """The text at once, and its scores a few at a time."""
        reader, rows = self._readers[number], piece.logprobs
        delta = reader.deltas(piece.text, piece.finish_reason)
        parts = list(rows.parts(SCORES)) if self.body.logprobs and rows is not None else []
        for low, high in parts or [(0, 0)]:
            choice: dict[str, Any] = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
            if self.body.logprobs:
                found = [] if rows is None else logprobs.chat(rows.rows(low, high), self.top, self.speller)
                choice["logprobs"] = {"content": found, "refusal": None}
            if final := (not parts or high == parts[-1][1]):
                choice["finish_reason"] = reader.reason(piece.finish_reason)
                if piece.finish_reason is not None:
                    choice["stop_reason"] = piece.stop_reason
            final = final and piece.finish_reason is not None
            if self.body.return_token_ids:
                choice["token_ids"] = piece.token_ids if low == 0 else []
            if final or delta or self.body.logprobs or self.body.return_token_ids:
                yield choice
            delta = {}

    def spoken(self, number: int) -> dict[str, Any] | None:
        if self.body.logprobs or self.body.return_token_ids or not self._readers[number].plain:
            return None
        return {"index": number, "delta": {"content": TEXT}, "logprobs": None, "finish_reason": None}

    async def whole(self, answer: Answer) -> list[dict[str, Any]]:
        while await answer.take():
            pass
        if self.asked is None:
            note_default(answer, self.default)
        choices, stream = [], answer.streams[0]
        for number, sample in enumerate(stream.order or range(self.n)):
            text, reader = stream.texts[sample], self._reader()
            reader.deltas(text.text, text.finish_reason or "stop")
            message = reader.message(self.role)
            if self.echoed:
                message["content"] = self.echoed + (message["content"] or "")
            choice: dict[str, Any] = {"index": number, "message": message, "logprobs": None}
            if self.body.logprobs and stream.scored is not None:
                choice["logprobs"] = {"content": TokenScores("chat", stream.scored[sample], self.top), "refusal": None}
            choice.update(finish_reason=reader.reason(text.finish_reason), stop_reason=text.stop_reason)
            if self.body.return_token_ids:
                choice["token_ids"] = text.token_ids
            choices.append(choice)
        if self.params.prompt_logprobs is not None:
            answer.more["prompt_logprobs"] = TokenScores("prompt", stream.prompt_logprobs)
        return choices


async def render(service: Service, messages: Any, shown: Any, body: Any, salt: Salt, who: str) -> list[int]:
    """Return the ids of a conversation, made by the model's chat template."""
    begin, split = begins_answer(body), body.split_special_tokens is not False
    ids = await service.tokens.chat(
        messages,
        shown,
        begin,
        body.chat_template_kwargs,
        salt,
        split,
        bool(body.continue_final_message),
        who,
        plain.check_documents(body.documents),
        body.chat_template,
    )
    before, behind = service.tokens.around if body.add_special_tokens else ([], [])
    return [*before, *ids, *behind]
