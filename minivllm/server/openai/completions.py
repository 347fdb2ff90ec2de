"""``POST /v1/completions``: text or token ids, one prompt or many, whole or as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from minivllm.server.errors import ApiError

from . import JsonObject, answers, logprobs
from .answers import Stretch, TokenScores
from .bodies import CompletionBody, named, naming, sent_names
from .generate import SCORES, TEXT, Answer, Service, checked, open_streams, read_values, respond
from .limits import check_cost, check_size, seconds_of
from .offsets import Placed, Places
from .params import fit, note_default, whole_form
from .prompts import truncated, truncation
from .tokens import Ids, read_prompts
from .work import Work

if TYPE_CHECKING:
    from minivllm.server.link.client import Stream, TextPiece
    from minivllm.server.link.scored import Scored, ScoredToken

DEFAULT_TOKENS = 16  # the default length of an answer in OpenAI's API


def default_tokens(body: Any, defaults: Mapping[str, Any]) -> int | None:
    """Return the length of an answer whose request does not set it.  None means the rest of the context."""
    return defaults.get("max_tokens") or (None if body.endless else DEFAULT_TOKENS)


async def completions(request: Request, service: Service) -> Any:
    return await answer(request, service, await read_values(request, service))


async def answer(request: Request, service: Service, values: JsonObject) -> Any:
    """Return the response to the completion with the given fields."""
    state = request.scope["state"]
    body = await checked(service, CompletionBody, values, state["owner"])
    work = Completion(service, body, state)
    seconds = seconds_of(service, body.timeout_s)
    return await respond(request, service, bool(body.stream), seconds, work)


class Completion(Work):
    """One request for the continuations of prompts."""

    sends_empty = True
    empty_choice: Mapping[str, Any] = {"text": ""}

    @naming
    def __init__(self, service: Service, body: Any, state: dict[str, Any]) -> None:
        super().__init__(service, body, state, body.best_of)
        info = service.client.info
        self.prompts = read_prompts(body.prompt, service.server.max_batch, info.vocab_size)
        if body.suffix:
            raise ApiError(400, "suffix is not supported: the model cannot fill gaps", "suffix")
        scores_prompt = body.echo or self.passed.get("prompt_logprobs") is not None
        self._set_length(default_tokens(body, service.defaults), 0 if scores_prompt else 1)
        self.only_scores = self.requested == 0
        self.kept = truncation(body, self.default if self.requested is None else self.requested, info.max_model_len)
        self.top = body.logprobs or 0
        self.echoed: list[str] = []  # the text of each prompt, for ``echo``
        self.sent: list[str | None] = []  # for ``echo``: the text of each prompt if the client sent text, else None
        self.ids: list[Ids] = []
        self._set_params(len(self.prompts), body.logprobs, whole_form(body))
        check_size(service, len(self.prompts), self.params, self.taps)
        self.scores_prompt = self.params.prompt_logprobs is not None
        if body.echo and body.logprobs is not None:
            most = max(self.top, self.params.prompt_logprobs or 0)
            self.params = dataclasses.replace(self.params, prompt_logprobs=most)

    async def prepare(self, held: AsyncExitStack) -> Answer:
        """Return the answer, with the streams of all prompts open; ``held`` closes them."""
        service, body = self.service, self.body
        with named(sent_names(body)):
            held.enter_context(service.door.enter(len(self.prompts), self.state["owner"]))
            requests: list[tuple[Ids, Any]] = []
            by_length: dict[int, Any] = {}  # prompts with the same limit share one object of parameters
            # if no token is requested, one is generated but not shown, because the scores of a prompt are returned with
            # a token
            requested = 1 if self.only_scores else self.requested
            for prompt, whole in zip(self.prompts, await self._encoded(), strict=True):
                ids = await self._cut(prompt, whole)
                self.ids.append(ids)
                most = fit(self.params, requested, len(ids), service.client.info, self.default)
                if most not in by_length:
                    by_length[most] = self.params.ending_after(most)
                requests.append((ids, by_length[most]))
            check_cost(service, requests)
            opening = open_streams(
                service, held, self.state, requests, bool(body.stream), self.taps, self.energy, model=self.model
            )
            streams = await opening
        return self._answer("cmpl", "text_completion", streams, hidden=self.only_scores)

    def _shorter(self, text: str) -> str:
        """Return the part of a text that truncation may keep, as many characters as the context can hold, or the whole
        text without truncation."""
        return text if self.kept is None else self.service.tokens.shorten(text, self.body.truncation_side)

    async def _encoded(self) -> list[Ids]:
        """Return the token ids of each prompt before truncation to its exact length.  Texts that are far too long are
        shortened first."""
        texts = [self._shorter(prompt) for prompt in self.prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in self.prompts if not isinstance(prompt, str)]
        special = self.body.add_special_tokens is not False
        owner = self.state["owner"]
        ids = await self.service.tokens.encode_all(texts, special, self.params.salt, owner=owner)
        encoded = iter(ids)
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in self.prompts]

    async def _cut(self, prompt: str | Ids, whole: Ids) -> Ids:
        """Return the token ids of a prompt after truncation.  With ``echo``, store their text as well."""
        ids = whole
        if self.kept is not None:
            ids = truncated(list(map(int, whole)), self.kept, self.body.truncation_side)
        if not self.body.echo:
            return ids
        text = prompt if isinstance(prompt, str) else None
        if len(ids) < len(whole) or (text is not None and self._shorter(text) != text):
            text = None  # the echoed text is decoded from the remaining tokens
        self.sent.append(text)
        if text is None:
            text = await self.service.tokens.decode(ids, owner=self.state["owner"])
        self.echoed.append(text)
        return ids

    def _choice(self, number: int, text: str, scores: Any, reason: str | None, stop: Any) -> JsonObject:
        """Return a choice in OpenAI's form.  If it has a finish reason (``reason``), it has ``stop_reason`` too."""
        choice = {"index": number, "text": text, "logprobs": scores, "finish_reason": reason}
        return choice if reason is None else {**choice, "stop_reason": stop}

    def _shape(self, rows: list[tuple[ScoredToken, int]]) -> JsonObject | None:
        """Return the ``logprobs`` of scored tokens, or None if they are not requested.

        Each token of ``rows`` has the position, in characters, at which it begins in the text of its choice."""
        if self.body.logprobs is None:
            return None
        found = logprobs.completion((row for row, _ in rows), self.top, self.speller)
        return {"text_offset": [place for _, place in rows], **found}

    def _prompt_stretch(self, at: int, stream: Stream) -> Stretch:
        """Return the scored tokens of the echoed prompt ``at`` and their place in the text of a choice."""
        text = self.sent[at]
        return Stretch(stream.prompt_logprobs, text is None, 0, text, len(self.echoed[at]))

    def _placed(self, at: int) -> Placed:
        """Return the object that counts the positions of tokens in the text of a choice for the prompt ``at``."""
        begin = len(self.echoed[at]) if self.body.echo else 0
        places = Places(self.service.tokens.tokenizer, self.params.skip_special_tokens, begin)
        return Placed(places, begin)

    def opening(self, answer: Answer) -> list[JsonObject]:
        """Create the state of a stream.  Return no events, because none is sent before the first piece."""
        numbers = range(len(self.ids) * self.n)
        self._rows: list[Placed] = []
        if self.body.logprobs is not None:
            self._rows = [self._placed(number // self.n) for number in numbers]
        # numbers of the choices that have not sent their prompt, and of those that have not sent the ids of their
        # prompt
        self._unsent = set(numbers) if self.body.echo or self.only_scores else set()
        self._without_ids = set(numbers) if self.body.return_token_ids else set()
        return []

    def choices(self, answer: Answer, number: int, piece: TextPiece) -> Iterator[JsonObject]:
        """Yield the choices of a piece: the echoed prompt if it is the first piece, then the new text."""
        at, body = number // self.n, self.body
        more: JsonObject = {"token_ids": []} if body.return_token_ids else {}
        if number in self._without_ids:
            self._without_ids.discard(number)
            more["prompt_token_ids"] = list(map(int, self.ids[at]))
        if number in self._unsent:
            self._unsent.discard(number)
            yield from self._prompt_choices(answer, number, more)
            more = {"token_ids": []} if body.return_token_ids else {}
        if self.only_scores:
            return
        if body.return_token_ids:
            more["token_ids"] = piece.token_ids
        end = piece.finish_reason, piece.stop_reason
        if body.logprobs is None:
            yield self._choice(number, piece.text, None, *end) | more
        else:
            yield from self._in_parts(number, piece.text, piece.logprobs, self._rows[number], end, more)

    def _prompt_choices(self, answer: Answer, number: int, more: JsonObject) -> Iterator[JsonObject]:
        """Yield the choices with the echoed prompt and its scores, which arrive with the first token."""
        at = number // self.n
        text = self.echoed[at] if self.body.echo else ""
        rows, placed = None, None
        if self.body.echo and self.body.logprobs is not None:
            stretch = self._prompt_stretch(at, answer.streams[at])
            rows = stretch.scored
            places = Places(self.service.tokens.tokenizer, stretch.skip, 0, stretch.prompt)
            placed = Placed(places)
        reason = "length" if self.only_scores else None
        yield from self._in_parts(number, text, rows, placed, (reason, None), more)

    def text_choice(self, number: int) -> JsonObject | None:
        """Return the choice of a piece of text, with ``TEXT`` as the text, or None if a choice has more than text."""
        body = self.body
        if body.logprobs is not None or body.return_token_ids or self.only_scores or number in self._unsent:
            return None
        return self._choice(number, TEXT, None, None, None)

    def _in_parts(
        self,
        number: int,
        text: str,
        rows: Scored | None,
        placed: Placed | None,
        end: tuple[Any, Any],
        more: JsonObject,
    ) -> Iterator[JsonObject]:
        """Yield a choice with ``text`` and ``more``, and further choices with the rest of its scores.

        ``end`` is the finish reason and the stop reason, which the last of the choices has."""
        parts = [] if rows is None else list(rows.parts(SCORES))
        for low, high in parts or [(0, 0)]:
            last = not parts or high == parts[-1][1]
            settled: list[Any] = []
            if placed is not None:
                final = last and (end[0] is not None or placed is not self._rows[number])
                new = () if rows is None else rows.rows(low, high)
                settled = placed.take(new, text, final)
            reason, stop = end if last else (None, None)
            choice = self._choice(number, text, self._shape(settled), reason, stop)
            yield {**choice, **more}
            text = ""
            more = {}

    async def whole(self, answer: Answer) -> list[JsonObject]:
        """Return the choices of the answer once it is complete, in the order of the prompts, and the best first for
        each prompt."""
        while await answer.take():
            pass
        if self.requested is None:
            note_default(answer, self.default)
        choices = []
        for at, stream in enumerate(answer.streams):
            ids = list(map(int, self.ids[at])) if self.body.return_token_ids else []
            for rank, sample in enumerate(stream.order or range(self.n)):
                choice = self._whole_choice(at, rank, stream, sample)
                if self.body.return_token_ids:
                    choice["token_ids"] = [] if self.only_scores else stream.texts[sample].token_ids
                    choice["prompt_token_ids"] = ids
                if self.scores_prompt:
                    choice["prompt_logprobs"] = TokenScores("prompt", stream.prompt_logprobs)
                choices.append(choice)
        return choices

    def _whole_choice(self, at: int, rank: int, stream: Stream, sample: int) -> JsonObject:
        """Return the choice with the given rank for the prompt ``at``, made from a sample of its stream."""
        number, text = at * self.n + rank, stream.texts[sample]
        prompt = self.echoed[at] if self.body.echo else ""
        scores = self._scores(at, stream, sample, len(prompt))
        if self.only_scores:
            return self._choice(number, prompt, scores, "length", None)
        return self._choice(number, prompt + text.text, scores, text.finish_reason, text.stop_reason)

    def _scores(self, at: int, stream: Stream, sample: int, begin: int) -> Any:
        """Return the ``logprobs`` of a whole choice, or None if they were not requested.

        The choice is ``sample`` of ``stream``, the stream of the prompt ``at``.  Its text is the echoed prompt, which
        has ``begin`` characters (0 without ``echo``), and the generated text."""
        if self.body.logprobs is None or stream.scored is None:
            return None
        stretches = [self._prompt_stretch(at, stream)] if self.body.echo else []
        if not self.only_scores:
            shown = begin + len(stream.texts[sample].text)
            stretches.append(Stretch(stream.scored[sample], self.params.skip_special_tokens, begin, None, shown))
        return answers.CompletionScores(stretches, self.top)
