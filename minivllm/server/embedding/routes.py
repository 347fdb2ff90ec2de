"""``POST /v1/embeddings``, ``/v1/score`` and ``/v1/rerank``, in the forms of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request

from minivllm.frontend.embedding import cosine, cosines, unique_texts
from minivllm.server.errors import ApiError
from minivllm.server.http.sse import EventStream, dump
from minivllm.server.openai import JsonObject, fields
from minivllm.server.openai.answers import PIECE
from minivllm.server.openai.bodies import EmbedBody, RerankBody, ScoreBody
from minivllm.server.openai.generate import Service, read_body, respond
from minivllm.server.openai.limits import seconds_of

from .inputs import read_documents, read_inputs, read_text
from .vectors import Embedded, EmbedFields, embed

if TYPE_CHECKING:
    from minivllm.server.http.connection import Direct

FLOAT, BASE64 = FORMATS = ("float", "base64")


async def embeddings(request: Request, service: Service) -> Any:
    """Return the embedding of each input."""
    return await _answered(request, service, EmbedBody, Embeddings)


async def score(request: Request, service: Service) -> Any:
    """Return the similarity of pairs of texts."""
    return await _answered(request, service, ScoreBody, ScoredTexts)


async def rerank(request: Request, service: Service) -> Any:
    """Return documents in the order of their similarity to a query."""
    return await _answered(request, service, RerankBody, Ranking)


async def _answered(request: Request, service: Service, model: Any, kind: type[PooledTexts]) -> Any:
    """Return the answer to a request whose body the pydantic class ``model`` describes."""
    body = await read_body(request, service, model)
    work: Any = kind(service, body, request.scope["state"])
    return await respond(request, service, False, seconds_of(service, body.timeout_s), work)


class PooledTexts:
    """One request whose texts are embedded.

    A subclass sets ``prompts`` and ``options``, and writes the answer from the vectors of the prompts."""

    stream_type: type[EventStream] = EventStream
    media_type = "application/json"
    prefix = ""  # prefix of the id of an answer

    def __init__(self, service: Service, body: Any, state: dict[str, Any]) -> None:
        self.service, self.body, self.state = service, body, state
        parameters, self.warnings = fields.check(body)
        for name in parameters:
            self.warnings.append({"field": name, "message": f"{name} has no effect here: no token is generated"})
        self.model = service.check_model(body.model)
        if self.model in service.adapters.by_name:
            raise ApiError(
                400,
                (
                    f"model={self.model[:100]!r} is an adapter, and vectors are the base model's; send a name of the "
                    "model"
                ),
                "model",
            )
        self.most, self.vocab = service.server.max_inputs, service.client.info.vocab_size
        self.prompts: Sequence[Any] = ()
        self.options = EmbedFields()

    async def prepare(self, held: AsyncExitStack) -> Embedded:
        """Embed the prompts."""
        found = await embed(self.service, self.state, self.state["owner"], self.prompts, self.options)
        found.warnings = self.warnings
        return found

    def head(self) -> JsonObject:
        """Return the members of the JSON answer that precede the results."""
        name = f"{self.prefix}-{self.state['request_id']}"
        return {"id": name, "object": "list", "created": int(time.time()), "model": self.model}

    def results(self, answer: Embedded) -> Iterator[Any]:
        """Yield the results of the answer.  A subclass implements it."""
        raise NotImplementedError

    def tail(self, answer: Embedded) -> JsonObject:
        """Return the members of the JSON answer that follow the results, at least one."""
        return {"usage": answer.usage()}

    results_name = "data"

    async def written(self, answer: Embedded) -> AsyncIterator[bytes]:
        """Yield the answer in pieces, so that no turn of the event loop is long."""
        slices = self.service.slices
        until = slices.begin()
        tail = self.tail(answer)
        if answer.warnings:
            tail["warnings"] = answer.warnings
        head = dump({**self.head(), self.results_name: []})
        held = head.removesuffix(b"]}")
        comma = b""
        for result in self.results(answer):
            held += comma + dump(result)
            comma = b","
            if len(held) >= PIECE:
                yield held
                held = b""
            if time.perf_counter() > until:
                until = await slices.next()
        yield held + b"]," + dump(tail).removeprefix(b"{")

    def events(self, answer: Embedded, direct: Direct | None = None) -> AsyncIterator[bytes]:
        """Raise TypeError, because these answers are not streamed."""
        raise TypeError("an answer with embeddings is not a stream")


class Embeddings(PooledTexts):
    """One request to ``/v1/embeddings``."""

    prefix = "embd"

    def __init__(self, service: Service, body: Any, state: dict[str, Any]) -> None:
        super().__init__(service, body, state)
        if body.encoding_format not in (None, *FORMATS):
            shown = body.encoding_format[:40]
            raise ApiError(400, f"encoding_format={shown!r}: expected float or base64", "encoding_format")
        self.prompts = read_inputs(body.input, "input", self.most, self.vocab)
        normalize = body.normalize is not False
        self.options = EmbedFields.of(body, normalize=normalize, dimensions=body.dimensions)

    def results(self, answer: Embedded) -> Iterator[Any]:
        """Yield the JSON object of each embedding."""
        as_text = self.body.encoding_format == BASE64
        for index, vector in enumerate(answer.vectors):
            values = encoded(vector) if as_text else vector.tolist()
            yield {"object": "embedding", "index": index, "embedding": values}


def encoded(vector: np.ndarray) -> str:
    """Return the little-endian float32 values of a vector as base64."""
    values = vector.astype("<f4")
    return base64.b64encode(values.tobytes()).decode()


class ScoredTexts(PooledTexts):
    """One request to ``/v1/score``."""

    prefix = "score"

    def __init__(self, service: Service, body: Any, state: dict[str, Any]) -> None:
        super().__init__(service, body, state)
        first = read_inputs(body.text_1, "text_1", self.most, self.vocab)
        second = read_inputs(body.text_2, "text_2", self.most, self.vocab)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            text = f"text_1 has {len(first)} texts and text_2 {len(second)}; expected one in text_1, or equally many"
            raise ApiError(400, text, "text_1")
        self.prompts, self.index = unique_texts(first, second)
        places = self._places(len(second))
        self.options = EmbedFields.of(body, places=places)

    def _places(self, pairs: int) -> list[str]:
        """Return for each prompt the place in the body at which it first occurs, such as "documents[3]"."""
        places: dict[int, str] = {}
        for number, index in enumerate(self.index):
            name = "text_1" if number < pairs else "text_2"
            places.setdefault(index, f"{name}[{number % pairs}]")
        return [places[index] for index in range(len(self.prompts))]

    def results(self, answer: Embedded) -> Iterator[JsonObject]:
        """Yield the JSON object with the similarity of each pair of texts."""
        pairs = len(self.index) // 2
        for number in range(pairs):
            one = answer.vectors[self.index[number]]
            other = answer.vectors[self.index[pairs + number]]
            yield {"index": number, "object": "score", "score": cosine(one, other)}


class Ranking(PooledTexts):
    """One request to ``/v1/rerank``."""

    prefix = "rerank"
    results_name = "results"

    def __init__(self, service: Service, body: Any, state: dict[str, Any]) -> None:
        super().__init__(service, body, state)
        query = read_text(body.query, "query", "query")
        self.documents = read_documents(body.documents, "documents", self.most)
        top = body.top_n
        if top is not None and top < 0:
            raise ApiError(400, f"top_n={str(top)[:24]}: expected a whole number >= 0", "top_n")
        self.top = top or len(self.documents)
        self.prompts = [query, *self.documents]
        places = ["query"]
        places += [f"documents[{number}]" for number in range(len(self.documents))]
        self.options = EmbedFields.of(body, places=places)

    def head(self) -> JsonObject:
        """Return the members of the JSON answer that precede the results."""
        name = f"{self.prefix}-{self.state['request_id']}"
        return {"id": name, "model": self.model}

    def results(self, answer: Embedded) -> Iterator[JsonObject]:
        """Yield an object with index, score and (unless the body refuses it) text for each of the best documents, the
        best first."""
        query, *vectors = answer.vectors
        scores = cosines(query, vectors).tolist()
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        shows = self.body.return_documents is not False
        for index in order[: self.top]:
            result: JsonObject = {"index": index}
            if shows:
                result["document"] = {"text": self.documents[index]}
            yield {**result, "relevance_score": scores[index]}
