"""The models of request bodies, made from the table of fields, and the reader that checks a body against its model.

Models check types.  ``SamplingParams`` and the routes check ranges, because the models know neither the vocabulary nor
the limits of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, create_model

from minivllm.core import declared_params
from minivllm.errors import RequestError, suggest
from minivllm.server.errors import ApiError
from minivllm.validation import faults

from . import JsonObject
from .field_table import (
    CHAT,
    COMPLETION,
    COUNT,
    CREATE,
    DETOKENIZE,
    EMBED,
    FORM,
    LOAD_ADAPTER,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_GENERATE,
    OLLAMA_MODEL,
    OLLAMA_PROMPT_EMBED,
    PAUSE,
    PREFIX,
    PREFIX_FILE,
    REQUIRED,
    RERANK,
    RESPONSES,
    SCORE,
    SLEEP,
    TEMPLATE,
    TOKENIZE,
    UNLOAD_ADAPTER,
    WEIGHTS,
    declared_by,
)
from .fields import Translation, check_required, translate


class Body(BaseModel):
    """A request body.  It converts no types, and keeps further fields for ``fields.check``."""

    model_config = ConfigDict(extra="allow", strict=True)


class Generation(Body):
    """The body of a request that generates tokens.  A field that is null counts as absent."""

    _translation: Translation | None = PrivateAttr(None)
    _known_form: JsonObject | None = PrivateAttr(None)

    @property
    def known_form(self) -> JsonObject | None:
        """Return the constraint on the answer's text (``params.whole_form``) if the worker pool has computed it, else
        None."""
        return self._known_form

    @property
    def endless(self) -> bool:
        """Return whether the client requested all tokens that the context can hold."""
        return self._translation is not None and self._translation.endless


def _model(name: str, base: type[Any], *routes: str) -> Any:
    """Return a model with the fields that the table of fields declares for exactly these routes."""
    declared: JsonObject = {}
    for field in declared_by(*routes).values():
        default = ... if field.type in REQUIRED else None
        declared[field.name] = (field.type, Field(default, description=field.text or None))
    return create_model(name, __base__=base, **declared)


GenerationBody = _model("GenerationBody", Generation, CHAT, COMPLETION)
ChatBody = _model("ChatBody", GenerationBody, CHAT)
CompletionBody = _model("CompletionBody", GenerationBody, COMPLETION)
TemplateBody = _model("TemplateBody", Body, TOKENIZE, TEMPLATE)
TokenizeBody = _model("TokenizeBody", TemplateBody, TOKENIZE)
DetokenizeBody = _model("DetokenizeBody", Body, DETOKENIZE)
CountBody = _model("CountBody", Body, CREATE, COUNT)
MessageBody = _model("MessageBody", CountBody, CREATE)
ResponsesBody = _model("ResponsesBody", Body, RESPONSES)
OllamaBody = _model("OllamaBody", Body, OLLAMA_CHAT, OLLAMA_GENERATE)
OllamaChatBody = _model("OllamaChatBody", OllamaBody, OLLAMA_CHAT)
OllamaEmbeddingsBody = _model("OllamaEmbeddingsBody", Body, OLLAMA_EMBED, OLLAMA_PROMPT_EMBED)
OllamaEmbedBody = _model("OllamaEmbedBody", OllamaEmbeddingsBody, OLLAMA_EMBED)
OllamaPromptEmbedBody = _model("OllamaPromptEmbedBody", OllamaEmbeddingsBody, OLLAMA_PROMPT_EMBED)
OllamaModelBody = _model("OllamaModelBody", Body, OLLAMA_MODEL)
OllamaGenerateBody = _model("OllamaGenerateBody", OllamaBody, OLLAMA_GENERATE)
PooledBody = _model("PooledBody", Body, EMBED, RERANK, SCORE)
EmbedBody = _model("EmbedBody", PooledBody, EMBED)
PauseBody = _model("PauseBody", Body, PAUSE)
SleepBody = _model("SleepBody", Body, SLEEP)
WeightsBody = _model("WeightsBody", Body, WEIGHTS)
PrefixBody = _model("PrefixBody", Body, PREFIX)
PrefixFileBody = _model("PrefixFileBody", Body, PREFIX_FILE)
RerankBody = _model("RerankBody", PooledBody, RERANK)
ScoreBody = _model("ScoreBody", PooledBody, SCORE)
UnloadAdapterBody = _model("UnloadAdapterBody", Body, LOAD_ADAPTER, UNLOAD_ADAPTER)
LoadAdapterBody = _model("LoadAdapterBody", UnloadAdapterBody, LOAD_ADAPTER)


def read(model: type[Any], values: Mapping[str, Any], sent: Mapping[str, str] | None = None) -> Any:
    """Return the values as a body of a model, with the fields of other servers translated.

    ``sent`` maps fields of ``values`` to the names of the client, if the values were made from a body of another
    protocol.  ApiError (400) names the first wrong field as the client spelled it."""
    if not issubclass(model, Generation):
        return _checked(model, values)
    declared = {*model.model_fields, *declared_params.names()}
    with named(sent or {}):
        translation = translate(values, declared)
    translation.sent.update(sent or {})
    check_required(translation.values, model)
    with named(translation.sent):
        body = _checked(model, translation.values)
    body._translation = translation
    return body


def _checked(model: type[Any], values: Mapping[str, Any]) -> Any:
    """Return the values as a body, checked by its model.  ApiError (400) names the first wrong field."""
    try:
        return model(**values)
    except ValidationError as exc:
        first = faults(exc, model, values)[0]
        text = first.text.replace("unknown option", "unknown field").replace("a table", "an object")
        raise ApiError(400, text, first.path or None) from None
    except TypeError:  # a key that is no Python name cannot be a keyword argument
        bad = [key for key in values if not key.isidentifier()]
        near = suggest(str(bad[:1]), model.model_fields)
        raise ApiError(400, f"unknown field {bad[:1]}.{near}") from None


@contextmanager
def named(sent: Mapping[str, str]) -> Iterator[None]:
    """Add to errors about a field the name under which the client sent it.

    ``sent`` maps fields of this server to names of the client."""
    try:
        yield
    except (ApiError, RequestError) as exc:
        notes = [f"{to} was sent as {name}" for to, name in sent.items() if to == exc.param or to in str(exc)]
        if not notes:
            raise
        param = sent.get(exc.param or "", exc.param)
        text = f"{exc} ({', '.join(notes)})"
        raise ApiError(getattr(exc, "status", 400), text, param) from exc


def sent_names(body: Any) -> dict[str, str]:
    """Return a map from fields of this server to the other names under which the client sent them."""
    names: dict[str, str] = {} if body._translation is None else dict(body._translation.sent)
    if body.max_tokens is None and getattr(body, "max_completion_tokens", None) is not None:
        names.setdefault("max_tokens", "max_completion_tokens")
    if body.structured_outputs is None:
        if body.response_format:
            names.setdefault(FORM, "response_format")
        elif getattr(body, "tools", None):
            names.setdefault(FORM, "tools")
    return names


def naming(make: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper of a request's ``__init__(self, service, body, state)``, in which errors have the client's field
    names."""

    @wraps(make)
    def made(self: Any, service: Any, body: Any, state: Any) -> None:
        with named(sent_names(body)):
            make(self, service, body, state)

    return made
