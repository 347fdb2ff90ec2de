"""``POST /v1/chat/completions``: an answer to a conversation, whole or as a stream, with tool calls."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from minivllm.runtime.replies.grammar import ANSWER, AUTO
from minivllm.runtime.replies.grammar import FORCED as FORCED_CALLS
from minivllm.runtime.replies.thinking import TAGS
from minivllm.runtime.text import messages as plain
from minivllm.runtime.text.marks import NO_MARKS, Marks
from minivllm.server.errors import ApiError

from . import JsonObject, Warnings, fields, logprobs, reasoning, tools
from .answers import TokenScores
from .bodies import ChatBody, named, naming, sent_names
from .calls import Finished, Part
from .generate import SCORES, TEXT, Answer, Service, checked, open_streams, read_values, respond
from .limits import check_cost, seconds_of
from .params import fit, form_of, note_default, whole_form
from .parsers import context_of, hidden_tags, opens_reasoning, reasoning_tokens
from .prompts import answer_role, begins_answer, last_content, truncated, truncation
from .reader import FORCED, Reader, end_of_calls, marks_of, pieces_of
from .thoughts import form_begins_behind, marks_of_thoughts
from .work import Work

if TYPE_CHECKING:
    from minivllm.core.interfaces.images import PlacedImage
    from minivllm.runtime.replies import ReplyContext
    from minivllm.runtime.tenant_cache import Salt
    from minivllm.server.link.client import TextPiece

MOST_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


async def chat_completions(request: Request, service: Service) -> Any:
    return await answer(request, service, await read_values(request, service))


async def answer(request: Request, service: Service, values: JsonObject) -> Any:
    """Return the response to the chat with the given fields."""
    state = request.scope["state"]
    body = await checked(service, ChatBody, values, state["owner"])
    work = Chat(service, body, state)
    seconds = seconds_of(service, body.timeout_s)
    return await respond(request, service, bool(body.stream), seconds, work)


def check_messages(messages: Any) -> list[JsonObject]:
    """Return a checked copy of a conversation.  ApiError or RequestError (400) names the place that is wrong."""
    listed = messages if isinstance(messages, list) else []
    if len(listed) > MOST_MESSAGES:
        text = f"messages: {len(listed)} messages; expected at most {MOST_MESSAGES}"
        raise ApiError(400, text, "messages")
    for number, message in enumerate(listed):
        if isinstance(message, dict) and message.get("role") not in ROLES:
            place = f"messages[{number}].role"
            role = str(message.get("role"))[:40]
            raise ApiError(400, f"{place}={role!r}: expected one of {', '.join(ROLES)}", place)
    return plain.check_messages(messages)


def _warn_unread(service: Service, messages: Any, warnings: Warnings) -> None:
    """Add a warning for each key of a message that no chat template of the model mentions."""
    tokenizer = service.tokens.tokenizer
    sources = [] if tokenizer is None else list(tokenizer.chat_templates.values())
    for place in plain.unread(messages, lambda key: any(key in source for source in sources)):
        if len(warnings) < fields.MOST:
            warnings.append({"field": place, "message": f"{place} has no effect here: no chat template reads it"})


class Chat(Work):
    """One request for an answer to a conversation."""

    sends_empty = False
    empty_choice: Mapping[str, Any] = {"delta": {}}

    @naming
    def __init__(self, service: Service, body: Any, state: dict[str, Any]) -> None:
        super().__init__(service, body, state)
        messages, self.sources = service.images.reader.take(body.messages)
        self.images: tuple[PlacedImage, ...] = ()  # images of the prompt
        self.messages = check_messages(messages)
        _warn_unread(service, self.messages, self.warnings)
        self.role = answer_role(self.messages, body)
        self.echoed = last_content(self.messages, body)
        self.tools = tools.read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        self.parser = service.parser()
        self.marks = marks_of(self.tools, self.parser, service.tokens.tokenizer)
        self.opened = False  # whether the prompt ends within the reasoning
        self.shows_reasoning = reasoning.shows_reasoning(body)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: expected only with logprobs=true", "top_logprobs")
        self.variables = self._variables()
        self.passed |= reasoning.budget_of(body, self.passed)
        self._set_length(service.defaults.get("max_tokens"))
        self.kept = truncation(body, self.requested or self.default, service.client.info.max_model_len)
        self.top = body.top_logprobs or 0
        self.in_pieces = bool(body.stream)  # whether the streams return text while it is generated
        self.mode = ""  # the mode of the grammar of calls, "" without a grammar
        self.behind = False  # whether the constrained form begins after the reasoning
        spelling = service.spelling() if self.tools.choice != "none" else None
        form = whole_form(body, self.tools, spelling)
        if form is not None:
            self._begin_form(form)
        elif self.tools.strict:
            reason = "this server cannot constrain calls that the model chooses; use tool_choice=required"
            fields.warn(self.warnings, "tools.function.strict", reason)
        self._set_params(1, self.top if body.logprobs else None, form)

    def _begin_form(self, form: JsonObject) -> None:
        """Set the parameter that lets the model reason before its constrained text, if the parser finds reasoning.

        ``form`` is the constraint on the text.  The parameter is not set where the grammar of ``form`` contains the
        reasoning itself: for free text with calls, and for models that write messages in channels.
        """
        tokenizer = self.service.tokens.tokenizer
        forced = self.tools.choice in FORCED
        if "reply" in form:
            beside = form_of(self.body) is not None
            self.mode = FORCED_CALLS if forced else ANSWER if beside else AUTO
        within = bool(self.mode) and self.parser.format.channels is not None
        if TAGS in self.service.client.info.reads and self.mode != AUTO and not within:
            if forced:
                marks = marks_of_thoughts(self.parser, tokenizer, self.passed)
                self.marks = marks or NO_MARKS
                self.behind = marks is not None
            else:
                self.behind = form_begins_behind(self.parser, tokenizer)
        if self.mode:
            self.marks = Marks.of(self.parser.tags(), tokenizer)
        if self.behind:
            self.passed.setdefault(TAGS, {})

    def _variables(self) -> Any:
        """Return the variables of the chat template: the client's variables, and those of the options of reasoning."""
        tokenizer = self.service.tokens.tokenizer
        read: Collection[str] = ()
        if tokenizer is not None:
            read = tokenizer.template_variables(self.body.chat_template, bool(self.tools.shown))
        reasoning.warn_unread(self.body, self.warnings)
        return reasoning.template_variables(self.body, read, self.warnings)

    async def prepare(self, held: AsyncExitStack) -> Answer:
        """Return the answer, with the stream of the request open; ``held`` closes it."""
        service = self.service
        body = self.body
        params = self.params
        owner = self.state["owner"]
        tokenizer = service.tokens.tokenizer
        held.enter_context(service.door.enter(1, owner))
        with named(sent_names(body)):
            ids = await self.prompt()
            most = fit(params, self.requested, len(ids), service.client.info, self.default)
            requests = [(ids, params.ending_after(most))]
            check_cost(service, requests, self.requested is None and self.default is None)
            begins = params.structured_outputs is not None and TAGS not in self.passed and self.mode != AUTO
            if not begins:  # without reasoning the constrained form begins with the answer
                self.opened = opens_reasoning(self.parser, tokenizer, ids)
            until = end_of_calls(self.tools, self.parser, self.marks, self._context())
            pieces = self.in_pieces or until is not None
            marks = self.marks.by_token
            opened = open_streams(
                service, held, self.state, requests, pieces, self.taps, self.energy, marks, self.model, self.images
            )
            streams = await opened
        if until is not None:
            streams[0].end_when(until)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        more = {"prompt_token_ids": ids} if body.return_token_ids else {}
        answer = self._answer("chatcmpl", kind, streams, more=more)
        if self._reader().thinks:
            answer.thought = {}
        return answer

    async def prompt(self) -> list[int]:
        """Return the token ids of the conversation.  ApiError (400) for ``truncate_prompt_tokens`` together with
        images."""
        body, owner = self.body, self.state["owner"]
        salt = self.params.salt
        ids = await render(self.service, self.messages, self.tools.shown, body, salt, owner, self.variables)
        if self.sources:
            if self.kept is not None:
                name = "truncate_prompt_tokens"
                raise ApiError(400, f"{name} with images is not implemented: leave one of them out", name)
            ids, self.images = await self.service.images.place(ids, self.sources, salt)
        return truncated(ids, self.kept, body.truncation_side)

    async def parts(self, answer: Answer) -> AsyncIterator[list[Part]]:
        """Yield the parts of a request's only choice as they are generated.  The last part is ``Finished``.

        The classes of other protocols make their events from these parts.
        """
        async for parts, _ in self.piece_parts(answer):
            yield parts

    async def piece_parts(self, answer: Answer) -> AsyncIterator[tuple[list[Part], TextPiece]]:
        """Yield the parts of each piece of a request's only choice, as ``parts`` does, with the piece."""
        reader = self._reader()
        slices = self.service.slices
        while pieces := await answer.take():
            until = slices.begin()
            for _, piece in pieces:
                answer.sent += len(piece.token_ids)
                parts: list[Part] = []
                for text, reason in pieces_of(piece.text, piece.finish_reason):
                    parts += reader.parts(text, reason)
                    if time.perf_counter() > until:  # much text was waiting for a slow client
                        until = await slices.next()
                if piece.finish_reason is not None:
                    self._count_thought(answer, piece.sample, reader)
                    parts.append(Finished(reader.reason(piece.finish_reason), piece.stop_reason))
                yield parts, piece

    def _reader(self) -> Reader:
        """Return a new reader for the text of one choice."""
        return Reader(self.tools, self.parser, self.marks, self.shows_reasoning, self._context())

    def _context(self) -> ReplyContext:
        """Return the facts about the request that the parser of the answer needs."""
        tokenizer = self.service.tokens.tokenizer
        hidden = hidden_tags(self.marks, tokenizer, self.params.skip_special_tokens)
        context = replace(context_of(self.tools, self.marks, hidden), opened=self.opened)
        if not self.mode:
            return context
        answer = self.mode == ANSWER
        return replace(context, calls=True, strict=True, behind=self.behind, answer=answer)

    def _count_thought(self, answer: Answer, number: int, reader: Reader) -> None:
        """Count the tokens of the reasoning of a complete choice."""
        if answer.thought is None:
            return
        ids = answer.streams[0].texts[number].token_ids
        share = reader.thought_share
        answer.thought[number] = reasoning_tokens(ids, self.marks, reader.tags, share, self.opened)

    def opening(self, answer: Answer) -> list[JsonObject]:
        """Return the choices with the role, and with the echoed message, which a stream sends first."""
        self._readers = [self._reader() for _ in range(self.n)]
        deltas = [{"role": self.role, "content": ""}]
        if self.echoed:
            deltas.append({"content": self.echoed})
        return [_chunk(number, delta) for delta in deltas for number in range(self.n)]

    def choices(self, answer: Answer, number: int, piece: TextPiece) -> Iterator[JsonObject]:
        """Yield the choices of a piece: first the text, then its scores in small groups."""
        reader, rows, body = self._readers[number], piece.logprobs, self.body
        *before, (text, reason) = pieces_of(piece.text, piece.finish_reason)
        for part, _ in before:  # much text was waiting for a slow client
            delta = reader.deltas(part, None)
            if delta:
                yield _chunk(number, delta)
        delta = reader.deltas(text, reason)
        parts = list(rows.parts(SCORES)) if body.logprobs and rows is not None else []
        for low, high in parts or [(0, 0)]:
            choice = _chunk(number, delta)
            if body.logprobs:
                new = () if rows is None else rows.rows(low, high)
                scores = logprobs.chat(new, self.top, self.speller)
                choice["logprobs"] = {"content": scores, "refusal": None}
            last = not parts or high == parts[-1][1]
            ends = last and piece.finish_reason is not None
            if last:
                choice["finish_reason"] = reader.reason(piece.finish_reason)
            if ends:
                self._count_thought(answer, piece.sample, reader)
                choice["stop_reason"] = piece.stop_reason
            if body.return_token_ids:
                choice["token_ids"] = piece.token_ids if low == 0 else []
            if ends or delta or body.logprobs or body.return_token_ids:
                yield choice
            delta = {}

    def text_choice(self, number: int) -> JsonObject | None:
        """Return the choice of a piece of text, with ``TEXT`` as the text, or None if a choice has more than text."""
        body = self.body
        if body.logprobs or body.return_token_ids:
            return None
        if not self._readers[number].plain:
            return None
        return _chunk(number, {"content": TEXT})

    async def whole(self, answer: Answer) -> list[JsonObject]:
        """Return the choices of the answer once it is complete, the best first if the engine has ordered them."""
        while await answer.take():
            pass
        if self.requested is None:
            note_default(answer, self.default)
        stream = answer.streams[0]
        order = stream.order or range(self.n)
        if self.params.prompt_logprobs is not None:
            answer.more["prompt_logprobs"] = TokenScores("prompt", stream.prompt_logprobs)
        choices = []
        for number, sample in enumerate(order):
            choice = await self._whole_choice(answer, number, stream, sample)
            choices.append(choice)
        return choices

    async def _whole_choice(self, answer: Answer, number: int, stream: Any, sample: int) -> JsonObject:
        """Return the choice ``number`` of a complete answer, made from a sample of its stream."""
        text, reader = stream.texts[sample], self._reader()
        slices = self.service.slices
        until = slices.begin()
        for piece, reason in pieces_of(text.marked, text.finish_reason or "stop"):
            reader.deltas(piece, reason)
            if time.perf_counter() > until:
                until = await slices.next()
        self._count_thought(answer, sample, reader)
        message = reader.message(self.role)
        if self.echoed:
            message["content"] = self.echoed + (message["content"] or "")
        choice: JsonObject = {"index": number, "message": message, "logprobs": None}
        if self.body.logprobs and stream.scored is not None:
            scores = TokenScores("chat", stream.scored[sample], self.top)
            choice["logprobs"] = {"content": scores, "refusal": None}
        choice.update(finish_reason=reader.reason(text.finish_reason), stop_reason=text.stop_reason)
        if self.body.return_token_ids:
            choice["token_ids"] = text.token_ids
        return choice


def _chunk(number: int, delta: JsonObject) -> JsonObject:
    """Return a choice of a stream that does not end with its delta."""
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


async def template_ids(request: Request, service: Service, body: Any) -> list[int]:
    """Return the token ids of the conversation of a body for a request that reads nothing else."""
    state = request.scope["state"]
    salt = state["tenant"], ""
    choice = tools.read_tools(body.tools, None, None)
    messages = check_messages(body.messages)
    variables = body.chat_template_kwargs
    return await render(service, messages, choice.shown, body, salt, state["owner"], variables)


async def render(
    service: Service, messages: Any, shown: Any, body: Any, salt: Salt, owner: str, variables: Any
) -> list[int]:
    """Return the token ids of a conversation, rendered by the model's chat template.

    ``shown`` are the tools that the template shows to the model.  ``owner`` identifies the client in the queue of the
    worker pool.  ``variables`` are the further variables of the template."""
    ids = await service.tokens.chat(
        messages,
        shown,
        begins_answer(body),
        variables,
        salt,
        body.split_special_tokens is not False,
        bool(body.continue_final_message),
        owner,
        plain.check_documents(body.documents),
        body.chat_template,
    )
    if not body.add_special_tokens:
        return ids
    before, after = service.tokens.around
    return [*before, *ids, *after]
