"""Make ``SamplingParams`` from a request body: check ranges, limits, the form of the answer and its length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.structured import StructuredOutputsParams
from minivllm.errors import suggest
from minivllm.server.errors import ApiError

from . import JsonObject, Warnings
from .field_table import CHAT, COMPLETION, FORM, declared_by
from .tools import COMPACT, Tools

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig
    from minivllm.runtime.replies.grammar import Spelling
    from minivllm.server.link.client import EngineInfo

PASSED = {name: row.to for name, row in declared_by(CHAT, COMPLETION).items() if row.to}
FORMAT, FORMAT_SCHEMA = "response_format", "response_format.json_schema"
FORMAT_KINDS = ("text", "json_object", "json_schema")
SCHEMA_KEYS = ("schema", "name", "strict", "description", "json_schema")
SHAPES = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))  # keywords that set a value's type
MOST_STOP_IDS = 10_000


def make_params(
    body: Any,
    more: Mapping[str, Any],
    logprobs: int | None,
    form: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    info: EngineInfo,
    server: ServerConfig,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """Return the sampling parameters of a body, without ``max_tokens``, which ``fit`` determines.

    ``more`` has the further parameters that ``fields.check`` returned.  ``logprobs`` and ``form`` (structured outputs)
    are made by the protocol from its own fields.  ``state`` has the ``tenant`` and ``trace`` of the client.
    ``defaults`` has the parameters of absent fields.  ApiError or RequestError for values out of range."""
    values = _declared_values(body, info, server)
    extra = {**more.get("extra", {}), **values.pop("extra", {})}
    values.update(more)
    if extra:
        values["extra"] = extra
    most_scores = min(server.max_logprobs, info.max_logprobs)
    if logprobs is not None:
        _expect(0 <= logprobs <= most_scores, "logprobs", f"0 to {most_scores}, not {logprobs}")
        values["logprobs"] = logprobs
    if form is not None:
        values[FORM] = form
    _check_prompt_logprobs(values.get("prompt_logprobs"), body.stream, most_scores)
    search = values.pop("use_beam_search", False)
    _expect(isinstance(search, bool), "use_beam_search", "true or false")
    if search:  # vLLM searches with as many beams as answers
        values.setdefault("beam_width", values.get("n", 1))
    client = {"tenant": state["tenant"], "trace_headers": state["trace"]}
    # a default is passed as a keyword, which takes precedence over a value in ``extra``, so such defaults are left out
    defaults = {name: value for name, value in defaults.items() if name not in extra}
    params = SamplingParams.make(**{**defaults, "max_tokens": None, **values, **client})
    _check_width(params, body.stream, server.max_n)
    return params


def _declared_values(body: Any, info: EngineInfo, server: ServerConfig) -> JsonObject:
    """Return the parameters of the declared fields that a body sets, with lists and objects checked."""
    values: JsonObject = {}
    for name, parameter in PASSED.items():
        value = getattr(body, name)
        if value is None:
            continue
        if name == "stop":
            value = _stops(value, server.max_stop)
        elif name == "stop_token_ids":
            _check_stop_ids(value, info.vocab_size)
        elif name == "logit_bias":
            value = _bias(value, info.vocab_size)
        elif name == "vllm_xargs":
            _expect(isinstance(value, dict), name, "an object of names and values")
        values[parameter] = value
    return values


def _check_width(params: SamplingParams, stream: bool | None, most: int) -> None:
    """Raise ApiError (400) for too many answers, samples or beams, and for ``best_of`` in a stream."""
    _expect(params.n <= most, "n", f"at most {most}")
    _expect(params.width <= most, "best_of" if params.best_of else "beam_width", f"at most {most}")
    selects = params.beam_width is None and params.width > params.n
    _expect(not (selects and stream), "best_of", "stream=false with it, because the best answers are known at the end")


def _check_prompt_logprobs(count: Any, stream: bool | None, most: int) -> None:
    """Raise ApiError (400) for more log-probabilities of a prompt token than of a generated token, or in a stream."""
    if count is None:
        return
    whole = isinstance(count, int) and not isinstance(count, bool)
    _expect(whole and 0 <= count <= most, "prompt_logprobs", f"0 to {most}, not {str(count)[:24]}")
    _expect(not stream, "prompt_logprobs", "stream=false with it")


def fit(
    params: SamplingParams, requested: int | None, prompt: int, info: EngineInfo, default: int | None = None
) -> int:
    """Return the most tokens that the answer to a prompt of ``prompt`` tokens may have.

    The limit is ``requested``, the number that the client requested, else ``default``, else the rest of the context.
    ApiError (400) if the prompt and the requested tokens exceed the context of the model."""
    limit = info.max_model_len
    if prompt + 1 > limit or (requested is not None and prompt + requested > limit):
        needed = "at least one token" if requested is None else f"{requested} tokens"
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens (max_model_len), but the prompt has {prompt} "
            f"tokens and the answer needs {needed} ({prompt + (requested or 1)} together). Shorten one of them.",
            "max_tokens" if prompt + 1 <= limit else "prompt",
        )
    if requested is not None and params.min_tokens > requested:
        raise ApiError(400, f"min_tokens={params.min_tokens}: expected at most max_tokens={requested}", "min_tokens")
    most = min(limit - prompt, default or limit) if requested is None else requested
    return max(most, min(params.min_tokens, limit - prompt))


def requested_tokens(body: Any, least: int = 1) -> int | None:
    """Return the requested length of an answer, from ``max_completion_tokens`` or ``max_tokens``, else None.

    ApiError (400) if it is below ``least``, or if both fields are present and differ."""
    declared = type(body).model_fields
    requested = {}
    for name in ("max_completion_tokens", "max_tokens"):
        # a further field that the model does not declare has an unchecked type and no effect
        value = getattr(body, name) if name in declared else None
        if value is not None:
            zero = "; 0 only with echo or prompt_logprobs" if "prompt" in declared else ""
            _expect(value >= least, name, f"a whole number >= 1, not {str(value)[:24]}{zero}")
            requested[name] = value
    if len(set(requested.values())) > 1:
        both = " and ".join(f"{name}={value}" for name, value in requested.items())
        raise ApiError(400, f"{both} contradict each other: send only one of them", next(iter(requested)))
    return next(iter(requested.values()), None)


def limited(requested: int | None, most: int | None, warnings: Warnings, sent: Mapping[str, str]) -> int | None:
    """Return the requested length of an answer, at most ``most``, the limit of the ``[sampling]`` table.  None means no
    limit.

    A request for more adds a warning under the field name that the client used (``sent``)."""
    if requested is None or most is None or requested <= most:
        return requested
    name = sent.get("max_tokens", "max_tokens")
    warnings.append({"field": name, "message": f"this server generates at most {most} tokens"})
    return int(most)


def note_default(answer: Any, default: int | None) -> None:
    """Add a warning to an answer that ends at the default length, which the client did not set."""
    if default is not None and any(t.finish_reason == "length" for s in answer.streams for t in s.texts):
        note = f"the request does not set it: the answer ends after {default} tokens"
        answer.warnings.append({"field": "max_tokens", "message": note})


def whole_form(body: Any, tools: Tools | None = None, spelling: Spelling | None = None) -> JsonObject | None:
    """Return the constraint on the text of an answer (structured outputs), from the body or from its tools.

    None means any text.  An answer with forced calls has no content, so ``response_format`` does not restrict it.  With
    ``tool_choice`` auto, an answer with a ``response_format`` may be calls instead, if the format in which the model
    writes calls (``spelling``) allows both.  ApiError (400) for ``structured_outputs`` together with forced calls.
    """
    ready = getattr(body, "known_form", None)
    if ready is not None:
        return ready
    form = form_of(body)
    if tools is None:
        return form
    forced = tools.choice in ("required", "named")
    if form is not None and not forced:
        return _form_beside_calls(body, form, tools, spelling)
    calls = tools.form(spelling)
    if calls is None:
        return form
    if body.structured_outputs is not None:
        raise ApiError(400, "tool_choice forces calls, so structured_outputs cannot set the form", "tool_choice")
    return structured(calls)


def _form_beside_calls(body: Any, form: JsonObject, tools: Tools, spelling: Spelling | None) -> JsonObject:
    """Return the constraint on an answer for which the body sets the constraint ``form``.

    It allows calls besides JSON of the form if ``tool_choice`` is auto and the format of calls (``spelling``) can
    express both.  Otherwise it is ``form``."""
    if tools.choice != "auto" or spelling is None or body.structured_outputs is not None:
        return form
    source = StructuredOutputsParams.of(form)
    if source is None:
        return form
    return tools.beside(json.loads(source.source.text), spelling) or form


def form_of(body: Any) -> JsonObject | None:
    """Return the constraint on the text that ``structured_outputs`` or ``response_format`` sets.  None means any text.

    ApiError (400) if both fields set one, or if this engine has no grammars."""
    form = body.structured_outputs
    is_form = form is None or (isinstance(form, dict) and "reply" not in form)
    _expect(is_form, FORM, "an object with one of json, regex, choice, grammar")
    if body.response_format is not None:
        _expect(isinstance(body.response_format, dict), FORMAT, 'an object with a "type"')
        other = _form_of_format(body.response_format)
        if other is not None and form is not None:
            raise ApiError(400, f"{FORMAT} and {FORM} both set a form: send only one of them", FORMAT)
        form = form if other is None else other
    return None if form is None else structured(form)


def _form_of_format(form: JsonObject) -> JsonObject | None:
    """Return the constrained form of a ``response_format``.  None means any text.  ApiError (400) for a malformed one.

    In OpenAI's API the schema is ``json_schema.schema``.  Other servers accept it next to ``type``, and also with
    ``json_object``.
    """
    kind = form.get("type")
    _check_keys(form, FORMAT, ("type", "json_schema", *(SCHEMA_KEYS if kind != "text" else ())))
    if kind not in FORMAT_KINDS:
        raise ApiError(400, f"{FORMAT}.type={str(kind)[:40]!r}: expected text, json_object or json_schema", FORMAT)
    if kind == "text":
        return None
    inner: Any = form.get("json_schema")
    if inner is None and "schema" in form:
        inner = form
    no_schema = inner is None or (isinstance(inner, dict) and inner.get("schema") is None)
    if kind == "json_object" and no_schema:
        return {"json_object": True, **COMPACT}
    _expect(isinstance(inner, dict), FORMAT_SCHEMA, "an object with name and schema")
    if inner is not form:
        _check_keys(inner, FORMAT_SCHEMA, SCHEMA_KEYS)
    schema = inner.get("schema", inner.get("json_schema"))
    _expect(isinstance(schema, dict), f"{FORMAT_SCHEMA}.schema", "a JSON schema")
    strict = inner.get("strict")
    _expect(strict is None or isinstance(strict, bool), f"{FORMAT_SCHEMA}.strict", "true or false")
    if kind == "json_object" and SHAPES.isdisjoint(schema):
        schema = {"type": "object", **schema}
    return {"json": schema, **COMPACT, "disable_additional_properties": strict is not False}


def _check_keys(values: Mapping[str, Any], at: str, keys: Sequence[str]) -> None:
    """Raise ApiError (400) for a key whose value is not null and that the server does not read."""
    for key, value in values.items():
        if key not in keys and value is not None:
            place = f"{at}.{str(key)[:64]}"
            text = f"{place}: unknown field; expected {', '.join(keys)}.{suggest(str(key), keys)}"
            raise ApiError(400, text, place)


def structured(form: JsonObject) -> JsonObject:
    """Return structured outputs (a constraint on the text) unchanged.  ApiError (400) if the engine has no grammars."""
    if FORM not in {field.name for field in fields(SamplingParams)}:
        raise ApiError(400, "this engine does not support structured outputs: describe the form in the prompt", FORM)
    return form


def _expect(condition: Any, name: str, expected: str) -> None:
    """Raise ApiError (400) about a field unless the condition holds.  ``expected`` describes the accepted values."""
    if not condition:
        raise ApiError(400, f"{name}: expected {expected}", name)


def _stops(value: Any, most: int) -> list[str]:
    """Return the stop texts of a body, which has one text or a list of at most ``most``.  ApiError (400) for other
    values."""
    stops = [value] if isinstance(value, str) else value
    _expect(isinstance(stops, list), "stop", "a string or a list of strings")
    _expect(len(stops) <= most, "stop", f"at most {most} strings, not {len(stops)}")
    _expect(all(isinstance(stop, str) for stop in stops), "stop", "a string or a list of strings")
    return stops


def _check_stop_ids(value: Any, vocab: int) -> None:
    """Raise ApiError (400) unless the value is a list of token ids of a vocabulary, at most ``MOST_STOP_IDS``."""
    _expect(isinstance(value, list), "stop_token_ids", "a list of token ids")
    are_ids = all(type(token) is int and 0 <= token < vocab for token in value[:MOST_STOP_IDS])
    expected = f"at most {MOST_STOP_IDS} token ids from 0 to {vocab - 1}"
    _expect(are_ids and len(value) <= MOST_STOP_IDS, "stop_token_ids", expected)


def _bias(value: Any, vocab: int) -> dict[int, float]:
    """Return a ``logit_bias`` with token ids as keys.  ApiError (400) for other keys, and for values beyond +-100."""
    _expect(isinstance(value, dict), "logit_bias", "an object of token ids and numbers")
    bias: dict[int, float] = {}
    for key, added in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10
        expected = f"token ids from 0 to {vocab - 1} as keys, not {str(key)[:20]!r}"
        _expect(digits and int(key) < vocab, "logit_bias", expected)
        number = isinstance(added, (int, float)) and not isinstance(added, bool)
        _expect(number and -100 <= added <= 100, "logit_bias", f"a number from -100 to 100 for token {key}")
        _expect(int(key) not in bias, "logit_bias", f"each token id once, not token {int(key)} again")
        bias[int(key)] = float(added)
    return bias
