"""``POST /v1/completions``: text or token ids, one prompt or many, whole or as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from minivllm.server.errors import ApiError

from . import answers, fields, logprobs
from .answers import Stretch, TokenScores
from .bodies import CompletionBody, named, naming, sent_names
from .generate import (
    SCORES,
    TEXT,
    Answer,
    Service,
    check_branches,
    check_cost,
    check_counts,
    check_told,
    open_streams,
    read_body,
    respond,
    seconds_of,
)
from .offsets import Placed, Places
from .params import asked_tokens, fit, limited, make_params, note_default, whole_form
from .prompts import truncated, truncation
from .taps import check_reads, read_taps
from .tokens import Ids, read_prompts
from .usage import asks_energy, stream_options

if TYPE_CHECKING:
    from minivllm.server.link.client import Stream, TextPiece
    from minivllm.server.link.scored import Scored, ScoredToken

DEFAULT_TOKENS = 16  # OpenAI's


def default_tokens(body: CompletionBody, defaults: Mapping[str, Any]) -> int | None:
    """Tokens of an answer whose request does not say; None: the rest of the context."""
    return defaults.get("max_tokens") or (None if body.endless else DEFAULT_TOKENS)


async def completions(request: Request, service: Service) -> Any:
    body = await read_body(request, service, CompletionBody)
    work = Completion(service, body, request.scope["state"])
    return await respond(request, service, bool(body.stream), seconds_of(service, body.timeout_s), work)


class Completion:
    """One request; ``state`` has its ids, tenant and what is to be logged of it."""

    tells_empty = True

    @naming
    def __init__(self, service: Service, body: CompletionBody, state: dict[str, Any]) -> None:
        self.service, self.body, self.state = service, body, state
        self.passed, self.warnings = fields.check(body, service.client.info.reads)
        self.model = service.check_model(body.model)
        self.usage, self.energy = stream_options(body), asks_energy(service, body)
        self.n = 1 if body.n is None else body.n
        info = service.client.info
        self.prompts = read_prompts(body.prompt, service.server.max_batch, info.vocab_size)
        check_counts(service, body.n, body.best_of)
        if body.suffix:
            raise ApiError(400, "suffix is not supported: the model does not fill gaps", "suffix")
        asked = asked_tokens(body, least=0 if body.echo or self.passed.get("prompt_logprobs") is not None else 1)
        self.asked = limited(asked, service.most_tokens, self.warnings, sent_names(body))
        self.default = default_tokens(body, service.defaults)
        self.only_scores = self.asked == 0
        self.kept = truncation(body, self.default if self.asked is None else self.asked, info.max_model_len)
        self.top = body.logprobs or 0
        self.echoed: list[str] = []  # with ``echo``: the text of each prompt
        self.given: list[str | None] = []  # and that text if the client sent it
        self.ids: list[Ids] = []
        more = self.passed if body.best_of is None else {**self.passed, "best_of": body.best_of}
        form = whole_form(body)
        self.params = make_params(body, more, body.logprobs, form, self.state, info, service.server, service.defaults)
        self.taps = read_taps(body.taps, self.state, service.server, self.params)
        self.silent: Mapping[str, Any] = {"text": ""}
        check_branches(service, len(self.prompts), self.params)
        check_reads(self.taps, service.client.info.tap_points, len(self.prompts), self.params)
        check_told(service, len(self.prompts), self.params, self.taps)
        as_ids = bool(body.return_tokens_as_token_ids)
        self.speller = logprobs.Speller(service.tokens.tokenizer, as_ids, self.params.detokenize)
        self.asks_scores = self.params.prompt_logprobs is not None
        if body.echo and body.logprobs is not None:
            self._score_prompt()

    def _score_prompt(self) -> None:
        """With echo, the log-probabilities of the prompt are wanted too."""
        most = max(self.top, self.params.prompt_logprobs or 0)
        self.params = dataclasses.replace(self.params, prompt_logprobs=most)

    async def prepare(self, held: AsyncExitStack) -> Answer:
        with named(sent_names(self.body)):
            return await self._prepared(held)

    async def _prepared(self, held: AsyncExitStack) -> Answer:
        service, body = self.service, self.body
        held.enter_context(service.door.enter(len(self.prompts), self.state["owner"]))
        asks: list[tuple[Ids, Any]] = []
        for_most: dict[int, Any] = {}  # prompts with the same limit share their parameters
        for prompt, whole in zip(self.prompts, await self._encoded(), strict=True):
            ids = await self._cut(prompt, whole)
            self.ids.append(ids)
            # one token is drawn where none is wanted, and not shown: the scores of the prompt come with it
            asked = 1 if self.only_scores else self.asked
            most = fit(self.params, asked, len(ids), service.client.info, self.default)
            if most not in for_most:
                for_most[most] = self.params.ending_after(most)
            asks.append((ids, for_most[most]))
        check_cost(service, asks)
        streams = await open_streams(service, held, self.state, asks, bool(body.stream), self.taps, self.energy)
        return Answer(
            service,
            f"cmpl-{self.state['request_id']}",
            "text_completion",
            self.model,
            streams,
            self.n,
            *self.usage,
            self.warnings,
            hidden=self.only_scores,
            reads=self.taps.reads,
            energy=self.energy,
        )

    def _shorter(self, text: str) -> str:
        return text if self.kept is None else self.service.tokens.shorten(text, self.body.truncation_side)

    async def _encoded(self) -> list[Ids]:
        """The ids of each prompt, before they are truncated."""
        texts = [self._shorter(prompt) for prompt in self.prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in self.prompts if not isinstance(prompt, str)]
        special, who = self.body.add_special_tokens is not False, self.state["owner"]
        encoded = iter(await self.service.tokens.encode_all(texts, special, self.params.salt, who=who))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in self.prompts]

    async def _cut(self, prompt: str | Ids, whole: Ids) -> Ids:
        """The ids of a prompt that are kept; with ``echo``, its text and the places of its tokens are too."""
        ids = whole
        if self.kept is not None:
            ids = truncated(list(map(int, whole)), self.kept, self.body.truncation_side)
        text = prompt if isinstance(prompt, str) else None
        if len(ids) < len(whole) or (text is not None and self._shorter(text) != text):
            text = None  # the text is that of the tokens that are left
        if self.body.echo:
            shown = await self.service.tokens.decode(ids, who=self.state["owner"]) if text is None else text
            self.echoed.append(shown)
            self.given.append(text)
        return ids

    def _choice(self, number: int, text: str, shaped: Any, reason: str | None, stop: Any) -> dict[str, Any]:
        choice = {"index": number, "text": text, "logprobs": shaped, "finish_reason": reason}
        return {**choice, "stop_reason": stop} if reason is not None else choice

    def _shape(self, rows: list[tuple[ScoredToken, int]]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        found = logprobs.completion((row for row, _ in rows), self.top, self.speller)
        return {"text_offset": [place for _, place in rows], **found}

    def _stretch(self, at: int, stream: Stream) -> Stretch:
        """An echoed prompt in its text."""
        text = self.given[at]
        return Stretch(stream.prompt_logprobs, text is None, 0, text, len(self.echoed[at]))

    def _placed(self, at: int) -> Placed:
        """For the rows of an answer to prompt ``at``."""
        begin = len(self.echoed[at]) if self.body.echo else 0
        return Placed(Places(self.service.tokens.tokenizer, self.params.skip_special_tokens, begin), begin)

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        count = len(self.ids) * self.n
        scored = range(count) if self.body.logprobs is not None else ()
        self._rows = [self._placed(number // self.n) for number in scored]
        self._silent = set(range(count)) if self.body.echo or self.only_scores else set()
        self._new = set(range(count)) if self.body.return_token_ids else set()
        return []

    def choices(self, answer: Answer, number: int, piece: TextPiece) -> Iterator[dict[str, Any]]:
        at = number // self.n
        more: dict[str, Any] = {"token_ids": []} if self.body.return_token_ids else {}
        if number in self._new:
            self._new.discard(number)
            more["prompt_token_ids"] = list(map(int, self.ids[at]))
        if number in self._silent:  # the prompt's scores are there once the first token is
            self._silent.discard(number)
            reason, shown = "length" if self.only_scores else None, self.echoed[at] if self.body.echo else ""
            rows, placed = None, None
            if self.body.echo and self.body.logprobs is not None:
                one = self._stretch(at, answer.streams[at])
                rows, placed = one.scored, Placed(Places(self.service.tokens.tokenizer, one.skip, 0, one.prompt))
            yield from self._told(number, shown, rows, placed, (reason, None), more)
            more = {"token_ids": []} if self.body.return_token_ids else {}
        if not self.only_scores:
            more |= {"token_ids": piece.token_ids} if self.body.return_token_ids else {}
            reason, stop = piece.finish_reason, piece.stop_reason
            if self.body.logprobs is None:
                yield self._choice(number, piece.text, None, reason, stop) | more
            else:
                yield from self._told(number, piece.text, piece.logprobs, self._rows[number], (reason, stop), more)

    def spoken(self, number: int) -> dict[str, Any] | None:
        body = self.body
        if body.logprobs is not None or body.return_token_ids or self.only_scores or number in self._silent:
            return None
        return self._choice(number, TEXT, None, None, None)

    def _told(
        self,
        number: int,
        text: str,
        rows: Scored | None,
        placed: Placed | None,
        end: tuple[Any, Any],
        more: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        """The choices that say ``text``, and then the rest of its scores, a few at a time."""
        parts = [] if rows is None else list(rows.parts(SCORES))
        for low, high in parts or [(0, 0)]:
            last = not parts or high == parts[-1][1]
            settled: list[Any] = []
            if placed is not None:
                final = last and (end[0] is not None or placed is not self._rows[number])
                settled = placed.take(() if rows is None else rows.rows(low, high), text, final)
            reason, stop = end if last else (None, None)
            yield {**self._choice(number, text, self._shape(settled), reason, stop), **more}
            text, more = "", {}

    async def whole(self, answer: Answer) -> list[dict[str, Any]]:
        while await answer.take():
            pass
        if self.asked is None:
            note_default(answer, self.default)
        choices = []
        for at, stream in enumerate(answer.streams):
            ids = list(map(int, self.ids[at])) if self.body.return_token_ids else []
            for rank, sample in enumerate(stream.order or range(self.n)):
                text = stream.texts[sample]
                token_ids, reason, stop = text.token_ids, text.finish_reason, text.stop_reason
                shown = self.echoed[at] if self.body.echo else ""
                begin = len(shown)
                if self.only_scores:
                    token_ids, reason, stop = [], "length", None
                else:
                    shown += text.text
                choice = self._choice(at * self.n + rank, shown, self._scores(at, stream, sample, begin), reason, stop)
                if self.body.return_token_ids:
                    choice["token_ids"], choice["prompt_token_ids"] = token_ids, ids
                if self.asks_scores:
                    choice["prompt_logprobs"] = TokenScores("prompt", stream.prompt_logprobs)
                choices.append(choice)
        return choices

    def _scores(self, at: int, stream: Stream, sample: int, begin: int) -> Any:
        """Of a choice whose answer begins at ``begin`` of its text."""
        if self.body.logprobs is None or stream.scored is None:
            return None
        stretches = [self._stretch(at, stream)] if self.body.echo else []
        if not self.only_scores:
            shown = begin + len(stream.texts[sample].text)
            found = stream.scored[sample]
            stretches.append(Stretch(found, self.params.skip_special_tokens, begin, None, shown))
        return answers.CompletionScores(stretches, self.top)
