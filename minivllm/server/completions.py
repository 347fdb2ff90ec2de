"""``POST /v1/completions``: text or token ids, one prompt or many, whole or as a stream."""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from . import fields, logprobs
from .errors import ApiError
from .generate import (
    Answer,
    Service,
    check_counts,
    open_streams,
    read_body,
    respond,
    seconds_of,
    stream_options,
)
from .params import asked_tokens, fit, form_of, make_params
from .protocol.completion import CompletionBody
from .tokens import read_prompts

if TYPE_CHECKING:
    from .client import Piece

DEFAULT_TOKENS = 16  # OpenAI's


async def completions(request: Request, service: Service) -> Any:
    body = await read_body(request, service, CompletionBody)
    work = Completion(service, body, request.scope["state"])
    return await respond(request, service, bool(body.stream), seconds_of(service, body.timeout_s), work)


class Completion:
    """One request; ``state`` has its ids, tenant and what is to be logged of it."""

    def __init__(self, service: Service, body: CompletionBody, state: dict[str, Any]) -> None:
        self.service, self.body, self.state = service, body, state
        self.passed, self.warnings = fields.check(body)
        self.model = service.check_model(body.model)
        self.usage = stream_options(body)
        self.n = 1 if body.n is None else body.n
        info = service.client.info
        self.prompts = read_prompts(body.prompt, service.server.max_batch, info.vocab_size)
        check_counts(service, len(self.prompts), body.n, body.best_of)
        if body.suffix:
            raise ApiError(400, "suffix is not supported: the model does not fill gaps", "suffix")
        self.asked = asked_tokens(body)
        self.speller = logprobs.Speller(service.tokens.tokenizer, bool(body.return_tokens_as_token_ids))
        self.top = body.logprobs or 0
        self.echoed: list[str] = []
        self.ids: list[list[int]] = []
        more = self.passed if body.best_of is None else {**self.passed, "best_of": body.best_of}
        form = form_of(body)
        self.params = make_params(body, more, body.logprobs, form, self.state, info, service.server, service.defaults)
        self.asks_scores = self.params.prompt_logprobs is not None
        if body.echo and body.logprobs is not None:
            self._score_prompt()

    def _score_prompt(self) -> None:
        """With echo, the log-probabilities of the prompt are wanted too."""
        most = max(self.top, self.params.prompt_logprobs or 0)
        self.params = dataclasses.replace(self.params, prompt_logprobs=most)

    async def prepare(self, held: AsyncExitStack) -> Answer:
        service, body = self.service, self.body
        held.enter_context(service.door.enter(len(self.prompts)))
        asks = []
        for prompt in self.prompts:
            if isinstance(prompt, str):
                ids = await service.tokens.encode(prompt, body.add_special_tokens is not False)
            else:
                ids = prompt
            self.ids.append(ids)
            if body.echo:
                self.echoed.append(prompt if isinstance(prompt, str) else service.tokens.need().decode(ids))
            most = fit(self.params, self.asked, len(ids), service.client.info, DEFAULT_TOKENS)
            asks.append((ids, dataclasses.replace(self.params, max_tokens=most)))
        streams = await open_streams(
            service, held, self.state["request_id"], asks, bool(body.stream), self.state["log"]
        )
        return Answer(
            service, f"cmpl-{self.state['request_id']}", "text_completion", self.model, streams, self.n, *self.usage,
            self.warnings,
        )  # fmt: skip

    def _choice(self, number: int, text: str, shaped: Any, reason: str | None, stop: Any) -> dict[str, Any]:
        choice = {"index": number, "text": text, "logprobs": shaped, "finish_reason": reason}
        return {**choice, "stop_reason": stop} if reason is not None else choice

    def _shape(self, offset: int) -> logprobs.Completion | None:
        return None if self.body.logprobs is None else logprobs.Completion(self.top, self.speller, offset)

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        self._shapes = [self._shape(0) for _ in range(len(self.ids) * self.n)]
        self._silent = set(range(len(self._shapes))) if self.body.echo else set()
        return []

    def choices(self, answer: Answer, number: int, piece: Piece) -> list[dict[str, Any]]:
        shape, said = self._shapes[number], []
        if number in self._silent:  # the prompt's scores are there once the first token is
            self._silent.discard(number)
            at = number // self.n
            scored = shape and shape.shape(_scores(answer.streams[at]))
            said.append(self._choice(number, self.echoed[at], scored, None, None))
        shaped = shape and shape.shape(piece.logprobs or ())
        said.append(self._choice(number, piece.text, shaped, piece.finish_reason, piece.stop_reason))
        if self.body.return_token_ids:
            said[-1]["token_ids"] = piece.token_ids
        return said

    async def whole(self, answer: Answer) -> list[dict[str, Any]]:
        while await answer.take():
            pass
        if self.asked is None and any(t.finish_reason == "length" for s in answer.streams for t in s.texts):
            answer.warnings.append({
                "field": "max_tokens", "message": f"it was not given: the answer ends after {DEFAULT_TOKENS} tokens",
            })  # fmt: skip
        choices = []
        for at, stream in enumerate(answer.streams):
            for rank, sample in enumerate(stream.order or range(self.n)):
                text = stream.texts[sample]
                shape = self._shape(0)
                rows = [*(_scores(stream) if self.body.echo else ()), *(text.logprobs or ())]
                shown = (self.echoed[at] if self.body.echo else "") + text.text
                number = at * self.n + rank
                choice = self._choice(number, shown, shape and shape.shape(rows), text.finish_reason, text.stop_reason)
                if self.body.return_token_ids:
                    choice["token_ids"], choice["prompt_token_ids"] = text.token_ids, self.ids[at]
                if self.asks_scores:
                    choice["prompt_logprobs"] = logprobs.prompt(stream.prompt_logprobs, self.speller)
                choices.append(choice)
        return choices


def _scores(stream: Any) -> list[Any]:
    """A row a token of the prompt; the token itself where it has no score."""
    if stream.prompt_logprobs is None:
        return []
    return [
        int(token) if row is None else row for token, row in zip(stream.prompt, stream.prompt_logprobs, strict=True)
    ]
