"""Fields that both completions and chat completions have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, WithJsonSchema

from minivllm.core import declared_params
from minivllm.errors import RequestError, suggest
from minivllm.server.errors import ApiError
from minivllm.server.openai import field_aliases, fields
from minivllm.validation import faults


def _list(items: dict[str, Any], *others: dict[str, Any]) -> Any:
    return WithJsonSchema({"anyOf": [{"type": "array", "items": items}, *others, {"type": "null"}]})


Texts = Annotated[Any, _list({"type": "string"}, {"type": "string"})]
Ids = Annotated[Any, _list({"type": "integer", "minimum": 0})]
_TAP = {
    "type": "object",
    "required": ["point"],
    "additionalProperties": False,
    "properties": {
        "point": {"type": "string"},
        "read": {"enum": ["mean", "last", None]},
        "add": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "scale": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
}
Taps = Annotated[Any, _list(_TAP)]
Table = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]


class Body(BaseModel):
    """Nothing is converted silently; names that are not here are looked at one by one (``fields.check``)."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = Field(None, description="a last chunk with the counts of tokens")
    continuous_usage_stats: bool | None = Field(None, description="the counts so far in every chunk")
    include_obfuscation: bool | None = Field(None, description="of OpenAI's; has no effect")


class Generation(Body):
    """How to draw tokens and when to stop; null is as good as absent."""

    _peers: field_aliases.Translated | None = PrivateAttr(None)  # what came under the names of other servers
    _known_form: dict[str, Any] | None = PrivateAttr(None)  # what the text must fit, if it has been worked out already

    @property
    def known_form(self) -> dict[str, Any] | None:
        return self._known_form

    @property
    def endless(self) -> bool:
        """The rest of the context was asked for in so many words."""
        return self._peers is not None and self._peers.endless

    model: str | None = Field(None, description="one of /v1/models; absent: the one that is served")
    n: int | None = Field(None, description="answers to each prompt")
    stream: bool | None = Field(None, description="server-sent events, ending with data: [DONE]")
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0: the likeliest token")
    top_p: float | None = None
    top_k: int | None = Field(None, description="extension: draw from the k likeliest; -1 or 0: all")
    min_p: float | None = Field(None, description="extension: least probability, as a share of the likeliest's")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(None, description="extension: above 1 repeats less")
    logit_bias: Table = Field(None, description="token id -> -100 to 100, added to its logit")
    seed: int | None = Field(None, description="makes the draws repeatable")
    stop: Texts = Field(None, description="texts before which to stop")
    max_tokens: int | None = None
    min_tokens: int | None = Field(None, description="extension: no end before as many tokens")
    stop_token_ids: Ids = Field(None, description="extension: tokens after which to stop")
    include_stop_str_in_output: bool | None = Field(None, description="extension: keep what stopped it in the text")
    ignore_eos: bool | None = Field(None, description="extension: go on after the end-of-sequence token")
    skip_special_tokens: bool | None = Field(None, description="extension: leave special tokens out of the text")
    structured_outputs: Table = Field(None, description="extension: json, regex, choice, grammar or json_object")
    response_format: Table = Field(None, description="text, json_object or json_schema")
    priority: int | None = Field(None, description="extension: smaller is sooner, if the scheduler looks at it")
    cache_salt: str | None = Field(None, description="extension: prefixes are shared only under the same salt")
    ttft_ms: float | None = Field(None, description="extension: the first token is wanted within as many ms")
    tpot_ms: float | None = Field(None, description="extension: each further token is wanted within as many ms")
    expected_tokens: int | None = Field(None, description="extension: how many tokens are expected, for the scheduler")
    timeout_s: float | None = Field(None, description="extension: the whole answer is wanted within as many seconds")
    vllm_xargs: Table = Field(None, description="extension: parameters of processors and samplers by name")
    truncate_prompt_tokens: int | None = Field(None, description="extension: keep as many of the prompt; -1: what fits")
    truncation_side: str | None = Field(None, description="extension: left (absent) or right: the side that is cut")
    return_token_ids: bool | None = Field(None, description="extension: token_ids beside the text")
    include_energy: bool | None = Field(None, description="extension: joules of the answer in its usage")
    taps: Taps = Field(None, description="extension, for operators: points of the model to read or to add vectors to")
    return_tokens_as_token_ids: bool | None = Field(None, description="extension: log-probabilities of token_id:N")


def read(model: type[Any], values: Mapping[str, Any]) -> Any:
    """The body as a model; fields of other servers are those of ours that mean the same.  ApiError (400) names the
    first field that is wrong."""
    if not issubclass(model, Generation):
        return _read(model, values)
    translated = field_aliases.translate(values, {*model.model_fields, *declared_params.names()})
    fields.misplaced(translated.values, model)
    with named(translated.sent):
        body = _read(model, translated.values)
    body._peers = translated
    return body


@contextmanager
def named(sent: Mapping[str, str]) -> Iterator[None]:
    """Tell in errors about fields under which names those came."""
    try:
        yield
    except (ApiError, RequestError) as exc:
        notes = [f"{to} was sent as {name}" for to, name in sent.items() if to == exc.param or to in str(exc)]
        if not notes:
            raise
        param = sent.get(exc.param or "", exc.param)
        raise ApiError(getattr(exc, "status", 400), f"{exc} ({', '.join(notes)})", param) from exc


def sent_names(body: Any) -> dict[str, str]:
    """Return our fields, and the names under which a body brought them, where those are others."""
    names: dict[str, str] = {} if body._peers is None else dict(body._peers.sent)
    if body.max_tokens is None and getattr(body, "max_completion_tokens", None) is not None:
        names.setdefault("max_tokens", "max_completion_tokens")
    if body.structured_outputs is None and (form := body.response_format or getattr(body, "tools", None)):
        names.setdefault("structured_outputs", "response_format" if form is body.response_format else "tools")
    return names


def naming(make: Callable[..., None]) -> Callable[..., None]:
    """Name the fields in what the ``__init__(self, service, body, state)`` of a request refuses as they were sent."""

    @wraps(make)
    def made(self: Any, service: Any, body: Any, state: Any) -> None:
        with named(sent_names(body)):
            make(self, service, body, state)

    return made


def _read(model: type[Any], values: Mapping[str, Any]) -> Any:
    try:
        return model(**values)
    except ValidationError as exc:
        # a key of the body that is no Python name cannot be a field
        found = faults(exc, model, values)
        first = found[0]
        text = first.text.replace("unknown option", "unknown field").replace("a table", "an object")
        raise ApiError(400, text, first.path or None) from None
    except TypeError:
        bad = [key for key in values if not key.isidentifier()]
        raise ApiError(400, f"unknown field {bad[:1]}.{suggest(str(bad[:1]), model.model_fields)}") from None
