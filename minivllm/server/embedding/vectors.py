"""Embed the prompts of one request: token ids, requests to the engine, vectors.

    prompts ──encode──► ids ──AT_ONCE at a time──► EngineClient.stream(pooling=...) ──► vectors f32 [hidden]

Other protocols call ``embed``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError
from minivllm.frontend.embedding import check_dimensions, read_truncation, vector_of
from minivllm.frontend.pooling import DefaultPooling
from minivllm.server import logs
from minivllm.server.errors import ApiError
from minivllm.server.openai import JsonObject
from minivllm.server.openai.limits import COST
from minivllm.server.openai.prompts import SIDES
from minivllm.server.openai.tokens import Ids

from .inputs import Input

if TYPE_CHECKING:
    from minivllm.server.openai.generate import Service

INPUT = "input"
AT_ONCE = 256  # largest number of prompts of a request that are in the engine at the same time


def field_of(place: str) -> str:
    """Return the field of a place, such as input for input[3]."""
    return place.partition("[")[0]


@dataclass(frozen=True)
class EmbedFields:
    """The fields of a request that determine how its texts become vectors.

    ``pooling`` None or "auto" is the pooling that the model's files name.  ``dimensions`` None keeps all values.
    ``truncate`` is the number of tokens of a prompt to keep: -1 keeps as many as fit, None refuses a prompt that is too
    long.  ``side`` is the side to cut.  ``special`` adds the tokenizer's special tokens to texts.  ``places`` names the
    place of each prompt in the client's body, for errors; without any it is in the field ``input``.
    """

    pooling: str | None = None
    normalize: bool = True
    dimensions: int | None = None
    truncate: int | None = None
    side: str | None = None
    special: bool = True
    cache_salt: str | None = None
    priority: int | None = None
    places: Sequence[str] = ()

    def place(self, number: int, count: int) -> str:
        """Return the place of a prompt, of ``count`` prompts, in the client's body."""
        if self.places:
            return self.places[number]
        return INPUT if count == 1 else f"{INPUT}[{number}]"

    @property
    def field(self) -> str:
        """Return the name of the body's field that has the first prompt, such as "input"."""
        return field_of(self.place(0, 1))

    @classmethod
    def of(cls, body: Any, **more: Any) -> EmbedFields:
        """Return the options in the fields that all bodies for embeddings have."""
        return cls(
            pooling=body.pooling,
            truncate=body.truncate_prompt_tokens,
            side=body.truncation_side,
            special=body.add_special_tokens is not False,
            cache_salt=body.cache_salt,
            priority=body.priority,
            **more,
        )


@dataclass
class Embedded:
    """The vectors f32 of prompts, in their order, and the tokens of the prompts."""

    vectors: list[np.ndarray]
    prompt_tokens: int
    cached_tokens: int = 0
    warnings: list[dict[str, str]] = field(default_factory=list)

    def usage(self) -> JsonObject:
        """Return the token counts in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def embed(
    service: Service,
    state: dict[str, Any],
    owner: str,
    prompts: Sequence[Input],
    options: EmbedFields | None = None,
) -> Embedded:
    """Embed texts and lists of token ids, and return their vectors.

    ``state`` is that of the request (``scope["state"]``), and ``owner`` its owner.  ApiError names the wrong prompt:
    400 for a prompt or option that cannot be served, 429 if the owner has too many prompts inside."""
    options = EmbedFields() if options is None else options
    pooling = _pooling(service, options)
    params = _params(state, options)
    held = min(len(prompts), AT_ONCE)
    with service.door.enter(held, owner):
        all_ids = await _encoded(service, owner, prompts, params, options)
        _check_lengths(service, all_ids, options)
        batch = _Batch(service, state, owner, all_ids, params, pooling, options)
        vectors = await batch.run()
    tokens = sum(map(len, all_ids))
    return Embedded(vectors, tokens, batch.cached_tokens)


def _pooling(service: Service, options: EmbedFields) -> str:
    """Check the options and return the pooling.  ApiError (400) or RequestError names a wrong option."""
    info = service.client.info
    if options.side not in SIDES:
        text = f"truncation_side={options.side[:40]!r}: expected left or right"
        raise ApiError(400, text, "truncation_side")
    if not info.hidden:
        name = options.field
        raise ApiError(400, f"{name}: the executor of this server makes no embeddings", name)
    check_dimensions(options.dimensions, info.hidden)
    default = DefaultPooling(info.pooling, info.pooling_fault)
    return default.chosen(options.pooling)


def _params(state: dict[str, Any], options: EmbedFields) -> SamplingParams:
    """Return the parameters of the requests to the engine."""
    values: dict[str, Any] = {"tenant": state["tenant"], "trace_headers": state["trace"]}
    if options.cache_salt is not None:
        values["cache_salt"] = options.cache_salt
    if options.priority is not None:
        values["priority"] = options.priority
    return SamplingParams.make(max_tokens=1, detokenize=False, **values)


async def _encoded(
    service: Service, owner: str, prompts: Sequence[Input], params: SamplingParams, options: EmbedFields
) -> list[Ids]:
    """Return the token ids of each prompt, truncated at the side that the options name if they request it."""
    tokens, side = service.tokens, options.side
    limit = service.client.info.max_model_len
    most = None
    if options.truncate is not None:
        most = read_truncation(options.truncate, limit)
    all_ids: list[Ids] = []
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if most is not None:
        texts = [tokens.shorten(text, side) for text in texts]
    encoded: Iterator[list[int]] = iter(())
    if texts:
        found = await tokens.encode_all(texts, options.special, params.salt, options.field, owner)
        encoded = iter(found)
    for prompt in prompts:
        ids = next(encoded) if isinstance(prompt, str) else prompt
        if most is not None and len(ids) > most:
            ids = ids[:most] if side == "right" else ids[-most:]
        all_ids.append(ids)
    return all_ids


def _check_lengths(service: Service, all_ids: Sequence[Ids], options: EmbedFields) -> None:
    """Raise ApiError (400) for a prompt without tokens or beyond the context, and for too many tokens together."""
    info = service.client.info
    for number, ids in enumerate(all_ids):
        at = options.place(number, len(all_ids))
        if not len(ids):
            raise ApiError(400, f"{at}: the text has no tokens; expected at least one", field_of(at))
        if len(ids) > info.max_model_len:
            problem = f"{at}: {len(ids)} tokens; expected at most {info.max_model_len} (max_model_len)"
            raise ApiError(400, f"{problem}: shorten it, or set truncate_prompt_tokens", field_of(at))
    most = service.server.max_request_cost
    if most is None:
        most = max(COST, 2 * info.max_model_len)
    total = sum(map(len, all_ids))
    if most and total > most:
        name = options.field
        problem = f"{name}: {total:,} tokens in all; expected at most {most:,} in a request (max_request_cost)"
        raise ApiError(400, f"{problem}: send several requests", name)


class _Batch:
    """The prompts of one request in the engine, at most ``AT_ONCE`` of them at a time."""

    def __init__(
        self,
        service: Service,
        state: dict[str, Any],
        owner: str,
        all_ids: Sequence[Ids],
        params: SamplingParams,
        pooling: str,
        options: EmbedFields,
    ) -> None:
        self.service, self.state, self.owner, self.all_ids = service, state, owner, all_ids
        self.params, self.pooling, self.options = params, pooling, options
        self.cached_tokens = 0
        self.vectors: list[np.ndarray] = [np.empty(0, np.float32)] * len(all_ids)

    async def run(self) -> list[np.ndarray]:
        """Return the vectors of all prompts.  If one fails or the task is cancelled, abort the others."""
        log = self.state["log"]
        log["prompt_tokens"] = sum(map(len, self.all_ids))
        log["completion_tokens"] = 0
        count = len(self.all_ids)
        numbers = iter(range(count))
        tasks = []
        for _ in range(min(AT_ONCE, count)):
            task = asyncio.create_task(self._work(numbers))
            tasks.append(task)
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        log["cached_tokens"] = self.cached_tokens
        return self.vectors

    async def _work(self, numbers: Iterator[int]) -> None:
        """Embed the next prompts until there are none.  ApiError (400) names the place of a prompt that the engine
        refuses."""
        for number in numbers:
            try:
                self.vectors[number] = await self._one(number)
            except RequestError as exc:
                at = self.options.place(number, len(self.all_ids))
                raise ApiError(400, f"{at}: {exc}", field_of(at)) from exc

    async def _one(self, number: int) -> np.ndarray:
        """Return the vector of one prompt.  ApiError (500) if the engine fails on it."""
        service, options = self.service, self.options
        name = f"{self.state['request_id']}-{number}"
        session = self.state.get("session", "")
        shared = {"owner": self.owner, "pooling": self.pooling, "session": session}
        stream = await service.client.stream(self.all_ids[number], self.params, name, pieces=False, **shared)
        error = None
        try:
            async with stream:
                async for piece in stream:
                    error = piece.error
        finally:  # runs too if the client has left or the time is over
            service.metrics.finished(stream, generates=False)
        self.cached_tokens += stream.cached_tokens
        found = stream.tapped.get(0)
        if not found:
            logs.event("the engine failed on a request", 40, answer=name, reason=error)
            raise ApiError(500, "the engine failed on this request; the server's log has the reason")
        return vector_of(found[0], options.normalize, options.dimensions)
