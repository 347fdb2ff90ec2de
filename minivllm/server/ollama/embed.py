"""``POST /api/embed`` and ``POST /api/embeddings``: vectors of texts in Ollama's form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from minivllm.server.embedding.routes import Embeddings
from minivllm.server.errors import ApiError
from minivllm.server.openai import JsonObject, fields
from minivllm.server.openai.bodies import EmbedBody, OllamaEmbedBody, OllamaPromptEmbedBody
from minivllm.server.openai.generate import Service, checked, read_body, respond
from minivllm.server.openai.limits import seconds_of

from .answers import nanoseconds
from .names import served_name, tagged

if TYPE_CHECKING:
    from minivllm.server.embedding.vectors import Embedded


async def embed(request: Request, service: Service) -> Any:
    """Return the normalized vector of each text.

    A text that is too long loses its end, unless ``truncate`` is false."""
    body = await read_body(request, service, OllamaEmbedBody, any_type=True)
    values = _values(service, body)
    if body.input is None or (isinstance(body.input, (str, list)) and not body.input):
        return JSONResponse({"model": _shown(service, body), "embeddings": []})
    values.update(input=body.input, dimensions=body.dimensions)
    if body.truncate is not False:
        values.update(truncate_prompt_tokens=-1, truncation_side="right")
    return await _respond(request, service, body, values, Vectors)


async def embeddings(request: Request, service: Service) -> Any:
    """Return the vector of one text as the model computes it (the older route)."""
    body = await read_body(request, service, OllamaPromptEmbedBody, any_type=True)
    values = _values(service, body)
    if not body.prompt:
        return JSONResponse({"embedding": []})
    values.update(input=body.prompt, normalize=False, truncate_prompt_tokens=-1, truncation_side="right")
    return await _respond(request, service, body, values, Vector)


def _values(service: Service, body: Any) -> JsonObject:
    """Return the fields of this server's embeddings that do not depend on the route.  ApiError (400) for wrong
    ``options``."""
    if body.options is not None and not isinstance(body.options, dict):
        raise ApiError(400, "options: expected an object of names and values", "options")
    values: JsonObject = dict(body.model_extra or {})
    values["model"] = served_name(service, body.model)
    if body.keep_alive is not None:
        values["keep_alive"] = body.keep_alive
    return values


def _shown(service: Service, body: Any) -> str:
    """Return the model's name for the answer."""
    return body.model or tagged(service.names[0])


async def _respond(request: Request, service: Service, body: Any, values: JsonObject, kind: type[Vectors]) -> Any:
    """Return the response to a request whose fields were translated to fields of this server."""
    state = request.scope["state"]
    inner = await checked(service, EmbedBody, values, state["owner"])
    work: Any = kind(service, inner, state)
    work.shown = _shown(service, body)
    work.warn_options(body.options or {})
    return await respond(request, service, False, seconds_of(service, inner.timeout_s), work)


class Vectors(Embeddings):
    """One request to ``/api/embed``."""

    results_name = "embeddings"
    shown = ""  # the name of the model in the answer, in the client's spelling

    def __init__(self, service: Service, body: Any, state: dict[str, Any]) -> None:
        super().__init__(service, body, state)
        self.begun = time.monotonic()

    def warn_options(self, options: JsonObject) -> None:
        """Add a warning for each option, because options are about the generation of tokens."""
        for name in options:
            if len(self.warnings) < fields.MOST:
                field = f"options.{str(name)[:64]}"
                self.warnings.append({"field": field, "message": f"{field} has no effect on embeddings"})

    def head(self) -> JsonObject:
        """Return the members of the JSON answer that precede the vectors."""
        return {"model": self.shown}

    def results(self, answer: Embedded) -> Iterator[Any]:
        """Yield the vectors."""
        for vector in answer.vectors:
            yield vector.tolist()

    def tail(self, answer: Embedded) -> JsonObject:
        """Return the members of the JSON answer that follow the vectors."""
        duration = nanoseconds(time.monotonic() - self.begun)
        return {"total_duration": duration, "load_duration": 0, "prompt_eval_count": answer.prompt_tokens}


class Vector(Vectors):
    """One request to ``/api/embeddings``."""

    results_name = "embedding"

    def __init__(self, service: Service, body: Any, state: dict[str, Any]) -> None:
        super().__init__(service, body, state)
        self.options = replace(self.options, places=["prompt"])

    def results(self, answer: Embedded) -> Iterator[Any]:
        """Yield the values of the only vector."""
        (vector,) = answer.vectors
        yield from vector.tolist()
