"""``POST /v1/completions``: text or token ids, one prompt or many, whole or as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from . import fields, logprobs
from .errors import ApiError
from .generate import (
    Answer,
    Service,
    check_branches,
    check_counts,
    check_told,
    open_streams,
    read_body,
    respond,
    seconds_of,
    stream_options,
)
from .offsets import Placed, Places
from .params import asked_tokens, fit, limited, make_params, note_default, whole_form
from .prompts import truncated, truncation
from .protocol.common import naming
from .protocol.completion import CompletionBody
from .tokens import Ids, read_prompts

if TYPE_CHECKING:
    from .client import Piece

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

    @naming
    def __init__(self, service: Service, body: CompletionBody, state: dict[str, Any]) -> None:
        self.service, self.body, self.state = service, body, state
        self.passed, self.warnings = fields.check(body, service.client.info.reads)
        self.model = service.check_model(body.model)
        self.usage = stream_options(body)
        self.n = 1 if body.n is None else body.n
        info = service.client.info
        self.prompts = read_prompts(body.prompt, service.server.max_batch, info.vocab_size)
        check_counts(service, body.n, body.best_of)
        if body.suffix:
            raise ApiError(400, "suffix is not supported: the model does not fill gaps", "suffix")
        asked = asked_tokens(body, least=0 if body.echo or self.passed.get("prompt_logprobs") is not None else 1)
        self.asked = limited(asked, service.defaults, self.warnings)
        self.default = default_tokens(body, service.defaults)
        self.only_scores = self.asked == 0
        self.kept = truncation(body, self.default if self.asked is None else self.asked, info.max_model_len)
        self.speller = logprobs.Speller(service.tokens.tokenizer, bool(body.return_tokens_as_token_ids))
        self.top = body.logprobs or 0
        self.echoed: list[str] = []  # with ``echo``: the text of each prompt
        self.given: list[str | None] = []  # and that text if the client sent it
        self._scored: dict[int, list[tuple[Any, int]]] = {}
        self.ids: list[Ids] = []
        more = self.passed if body.best_of is None else {**self.passed, "best_of": body.best_of}
        form = whole_form(body)
        self.params = make_params(body, more, body.logprobs, form, self.state, info, service.server, service.defaults)
        check_branches(service, len(self.prompts), self.params)
        check_told(service, len(self.prompts), self.params)
        self.asks_scores = self.params.prompt_logprobs is not None
        if body.echo and body.logprobs is not None:
            self._score_prompt()

    def _score_prompt(self) -> None:
        """With echo, the log-probabilities of the prompt are wanted too."""
        most = max(self.top, self.params.prompt_logprobs or 0)
        self.params = dataclasses.replace(self.params, prompt_logprobs=most)

    async def prepare(self, held: AsyncExitStack) -> Answer:
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
        streams = await open_streams(service, held, self.state, asks, bool(body.stream))
        return Answer(
            service, f"cmpl-{self.state['request_id']}", "text_completion", self.model, streams, self.n, *self.usage,
            self.warnings, hidden=self.only_scores,
        )  # fmt: skip

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

    def _shape(self, rows: list[tuple[Any, int]]) -> dict[str, Any] | None:
        return None if self.body.logprobs is None else logprobs.completion(rows, self.top, self.speller)

    def _prompt_rows(self, at: int, stream: Any) -> list[tuple[Any, int]]:
        """The scores of an echoed prompt, placed in its text."""
        if not self.body.echo or self.body.logprobs is None:
            return []
        if at not in self._scored:
            text = self.given[at]
            places = Places(self.service.tokens.tokenizer, text is None, prompt=text)
            self._scored[at] = Placed(places).take(_scores(stream), self.echoed[at], True)
        return self._scored[at]

    def _placed(self, at: int) -> Placed:
        """For the rows of an answer to prompt ``at``."""
        begin = len(self.echoed[at]) if self.body.echo else 0
        return Placed(Places(self.service.tokens.tokenizer, self.params.skip_special_tokens, begin), begin)

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        count = len(self.ids) * self.n
        self._rows = [self._placed(number // self.n) for number in range(count)]
        self._silent = set(range(count)) if self.body.echo or self.only_scores else set()
        self._new = set(range(count)) if self.body.return_token_ids else set()
        return []

    def choices(self, answer: Answer, number: int, piece: Piece) -> list[dict[str, Any]]:
        at, said = number // self.n, []
        if number in self._silent:  # the prompt's scores are there once the first token is
            self._silent.discard(number)
            scored = self._shape(self._prompt_rows(at, answer.streams[at]))
            reason = "length" if self.only_scores else None
            said.append(self._choice(number, self.echoed[at] if self.body.echo else "", scored, reason, None))
            if self.body.return_token_ids:
                said[0]["token_ids"] = []
        if not self.only_scores:
            rows = self._rows[number].take(piece.logprobs or (), piece.text, piece.finish_reason is not None)
            shaped = self._shape(rows)
            said.append(self._choice(number, piece.text, shaped, piece.finish_reason, piece.stop_reason))
            if self.body.return_token_ids:
                said[-1]["token_ids"] = piece.token_ids
        if said and number in self._new:
            self._new.discard(number)
            said[0]["prompt_token_ids"] = list(map(int, self.ids[at]))
        return said

    async def whole(self, answer: Answer) -> list[dict[str, Any]]:
        while await answer.take():
            pass
        if self.asked is None:
            note_default(answer, self.default)
        choices = []
        for at, stream in enumerate(answer.streams):
            for rank, sample in enumerate(stream.order or range(self.n)):
                text = stream.texts[sample]
                rows, shown = [*self._prompt_rows(at, stream)], self.echoed[at] if self.body.echo else ""
                token_ids, reason, stop = text.token_ids, text.finish_reason, text.stop_reason
                if self.only_scores:
                    token_ids, reason, stop = [], "length", None
                else:
                    rows += self._placed(at).take(text.logprobs or (), text.text, True)
                    shown += text.text
                choice = self._choice(at * self.n + rank, shown, self._shape(rows), reason, stop)
                if self.body.return_token_ids:
                    choice["token_ids"], choice["prompt_token_ids"] = token_ids, list(map(int, self.ids[at]))
                if self.asks_scores:
                    choice["prompt_logprobs"] = logprobs.prompt(_rows_of_prompt(stream), self.speller)
                choices.append(choice)
        return choices


def _scores(stream: Any) -> list[Any]:
    """A row a token of the prompt; the token itself where it has no score."""
    rows = _rows_of_prompt(stream)
    return [int(token) if row is None else row for token, row in zip(stream.prompt, rows, strict=True)]


def _rows_of_prompt(stream: Any) -> Any:
    """Of a prompt of one token the engine has nothing to tell: nothing came before it."""
    return [None] * len(stream.prompt) if stream.prompt_logprobs is None else stream.prompt_logprobs
