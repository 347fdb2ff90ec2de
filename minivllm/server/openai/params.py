"""From a body to ``SamplingParams``: ranges, limits at the door, the form of the answer, the length of the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import suggest
from minivllm.server.errors import ApiError

from .tools import COMPACT, Tools

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig
    from minivllm.server.link.client import EngineInfo

SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "priority", "cache_salt",
    "ttft_ms", "tpot_ms", "expected_tokens",
)  # fmt: skip
SCHEMA_KEYS = ("schema", "name", "strict", "description", "json_schema")
STRUCTURED = "structured_outputs"
SHAPES = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))  # say themselves what a value is


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
    """``more`` are fields that have been looked at, ``logprobs`` and ``form`` (structured outputs) what the protocol
    made of its own; ``state`` has ``tenant`` and ``trace`` of who asks; ``defaults`` are the sampling
    parameters of fields that are absent.  ``max_tokens`` is left to ``fit``.  ApiError or RequestError for what is out
    of range."""
    values = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    values.update(more)
    if body.stop is not None:
        values["stop"] = _stops(body.stop, server.max_stop)
    if body.stop_token_ids is not None:
        values["stop_token_ids"] = _ids(body.stop_token_ids, info.vocab_size)
    if body.logit_bias is not None:
        values["logit_bias"] = _bias(body.logit_bias, info.vocab_size)
    if body.vllm_xargs is not None:
        _want(isinstance(body.vllm_xargs, dict), "vllm_xargs", "an object of names and values")
        values["extra"] = {**values.get("extra", {}), **body.vllm_xargs}
    if logprobs is not None:
        most = min(server.max_logprobs, info.max_logprobs)
        _want(0 <= logprobs <= most, "logprobs", f"0 to {most}, not {logprobs}")
        values["logprobs"] = logprobs
    if form is not None:
        values[STRUCTURED] = form
    _check_scores(values, body.stream, min(server.max_logprobs, info.max_logprobs))
    beams = values.pop("use_beam_search", False)
    _want(isinstance(beams, bool), "use_beam_search", "true or false")
    if beams:  # vLLM's way to ask for as many beams as answers
        values.setdefault("beam_width", values.get("n", 1))
    who = {"tenant": state["tenant"], "trace_headers": state["trace"]}
    # what stands in ``extra`` takes the place of a default too, which is a keyword and would count before it
    defaults = {name: value for name, value in defaults.items() if name not in values.get("extra", ())}
    made = SamplingParams.make(**{**defaults, "max_tokens": None, **values, **who})
    _want(made.n <= server.max_n, "n", f"at most {server.max_n}")
    _want(made.width <= server.max_n, "best_of" if made.best_of else "beam_width", f"at most {server.max_n}")
    sampled = made.beam_width is None and made.width > made.n
    _want(not (sampled and body.stream), "best_of", "stream=false beside it: the best is known at the end")
    return made


def _check_scores(values: Mapping[str, Any], stream: bool | None, most: int) -> None:
    """Log-probabilities of the prompt are bounded as those of the answer are."""
    if (k := values.get("prompt_logprobs")) is not None:
        whole = isinstance(k, int) and not isinstance(k, bool)
        _want(whole and 0 <= k <= most, "prompt_logprobs", f"0 to {most}, not {str(k)[:24]}")
        _want(not stream, "prompt_logprobs", "stream=false beside it")


def fit(params: SamplingParams, asked: int | None, prompt: int, info: EngineInfo, least: int | None = None) -> int:
    """How many tokens an answer to a prompt of ``prompt`` tokens may have: as many as were asked for, else ``least``,
    else the rest of the context.  ApiError (400) if that is too much for the model."""
    limit = info.max_model_len
    if prompt + 1 > limit or (asked is not None and prompt + asked > limit):
        wanted = "at least one token" if asked is None else f"{asked} tokens"
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens (max_model_len), but the prompt has {prompt} "
            f"tokens and {wanted} of an answer were asked for ({prompt + (asked or 1)} together). Shorten one of them.",
            "max_tokens" if prompt + 1 <= limit else "prompt",
        )
    most = asked if asked is not None else min(limit - prompt, least or limit)
    if asked is not None and params.min_tokens > asked:
        raise ApiError(400, f"min_tokens={params.min_tokens}: want at most max_tokens={asked}", "min_tokens")
    return max(most, min(params.min_tokens, limit - prompt))


def asked_tokens(body: Any, least: int = 1) -> int | None:
    """``max_completion_tokens`` or ``max_tokens``, at least ``least``.  ApiError (400) if both are given and differ."""
    given = {}
    for name in ("max_completion_tokens", "max_tokens"):
        # a field that the body does not declare is of any type, and without effect
        value = getattr(body, name) if name in type(body).model_fields else None
        if value is not None:
            also = "; 0 only beside echo or prompt_logprobs" if "prompt" in type(body).model_fields else ""
            _want(value >= least, name, f"a whole number >= 1, not {str(value)[:24]}{also}")
            given[name] = value
    if len(set(given.values())) > 1:
        told = " and ".join(f"{name}={value}" for name, value in given.items())
        raise ApiError(400, f"{told} contradict each other: want one of them", next(iter(given)))
    return next(iter(given.values()), None)


def limited(asked: int | None, most: int | None, warnings: list[dict[str, str]], sent: Mapping[str, str]) -> int | None:
    """Return the tokens of an answer, at most ``most`` (of the ``[sampling]`` table); warn of a request for more
    under the name by which it came (``sent``)."""
    if asked is None or most is None or asked <= most:
        return asked
    name = sent.get("max_tokens", "max_tokens")
    warnings.append({"field": name, "message": f"this server gives at most {most} tokens"})
    return int(most)


def note_default(answer: Any, default: int | None) -> None:
    """Warn of an answer that ends where nobody asked it to."""
    if default is not None and any(t.finish_reason == "length" for s in answer.streams for t in s.texts):
        note = f"it was not given: the answer ends after {default} tokens"
        answer.warnings.append({"field": "max_tokens", "message": note})


def whole_form(body: Any, tools: Tools | None = None) -> dict[str, Any] | None:
    """What the text must fit, calls of tools that are forced among it; None: anything.  ApiError (400) for both."""
    if (known := getattr(body, "known_form", None)) is not None:
        return known
    form, forced = form_of(body), None if tools is None else tools.form()
    if forced is None:
        return form
    if form is not None:
        raise ApiError(400, "tool_choice forces calls, and the answer's form is given too", "tool_choice")
    return structured(forced)


def form_of(body: Any) -> dict[str, Any] | None:
    """What the text must fit, from ``structured_outputs`` or ``response_format``; None: anything.

    ApiError (400) where they ask for different things, or where this engine has no grammars."""
    form, asked = body.structured_outputs, body.response_format
    _want(form is None or isinstance(form, dict), STRUCTURED, "an object with one of json, regex, choice, grammar")
    if asked is not None:
        _want(isinstance(asked, dict), "response_format", 'an object with a "type"')
        made = _format(asked)
        if made is not None and form is not None:
            raise ApiError(400, "response_format beside structured_outputs: want one", "response_format")
        form = form if made is None else made
    return None if form is None else structured(form)


def _format(asked: dict[str, Any]) -> dict[str, Any] | None:
    kind = asked.get("type")
    _known(asked, "response_format", ("type", "json_schema", *(SCHEMA_KEYS if kind != "text" else ())))
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise ApiError(
            400, f"response_format.type={str(kind)[:40]!r}: want text, json_object or json_schema", "response_format"
        )
    # OpenAI's place of a schema is json_schema.schema; other servers have it beside the type, and with json_object too
    inner: Any = asked.get("json_schema")
    inner = asked if inner is None and "schema" in asked else inner
    if kind == "json_object" and (inner is None or (isinstance(inner, dict) and inner.get("schema") is None)):
        return {"json_object": True, **COMPACT}
    _want(isinstance(inner, dict), "response_format.json_schema", "an object with name and schema")
    if inner is not asked:
        _known(inner, "response_format.json_schema", SCHEMA_KEYS)
    schema = inner.get("schema", inner.get("json_schema"))
    _want(isinstance(schema, dict), "response_format.json_schema.schema", "a JSON schema")
    strict = inner.get("strict")
    _want(strict is None or isinstance(strict, bool), "response_format.json_schema.strict", "true or false")
    if kind == "json_object" and SHAPES.isdisjoint(schema):
        schema = {"type": "object", **schema}
    return {"json": schema, **COMPACT, "disable_additional_properties": strict is not False}


def _known(given: Mapping[str, Any], at: str, keys: Sequence[str]) -> None:
    """ApiError (400) for a key that says something and is not read."""
    for key, value in given.items():
        if key not in keys and value is not None:
            place = f"{at}.{str(key)[:64]}"
            raise ApiError(400, f"{place}: unknown field; want {', '.join(keys)}.{suggest(str(key), keys)}", place)


def structured(form: dict[str, Any]) -> dict[str, Any]:
    """The form, if the engine has grammars.  ApiError (400) if it has none."""
    if STRUCTURED not in {field.name for field in fields(SamplingParams)}:
        raise ApiError(
            400, "structured outputs are not supported by this engine: ask in the prompt instead", STRUCTURED
        )
    return form


def _want(ok: Any, name: str, want: str) -> None:
    if not ok:
        raise ApiError(400, f"{name}: want {want}", name)


def _stops(value: Any, most: int) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    _want(isinstance(stops, list), "stop", "a string or a list of strings")
    _want(len(stops) <= most, "stop", f"at most {most} strings, not {len(stops)}")
    _want(all(isinstance(s, str) for s in stops), "stop", "a string or a list of strings")
    return stops


def _ids(value: Any, vocab: int) -> list[int]:
    _want(isinstance(value, list), "stop_token_ids", "a list of token ids")
    ok = all(type(i) is int and 0 <= i < vocab for i in value[:10_000])
    _want(ok and len(value) <= 10_000, "stop_token_ids", f"token ids from 0 to {vocab - 1}")
    return value


def _bias(value: Any, vocab: int) -> dict[int, float]:
    _want(isinstance(value, dict), "logit_bias", "an object of token ids and numbers")
    made = {}
    for key, by in value.items():
        ok = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab
        _want(ok, "logit_bias", f"token ids from 0 to {vocab - 1} as keys, not {str(key)[:20]!r}")
        number = isinstance(by, (int, float)) and not isinstance(by, bool)
        _want(number and -100 <= by <= 100, "logit_bias", f"a number from -100 to 100 for token {key}")
        _want(int(key) not in made, "logit_bias", f"each token id once, not token {int(key)} again")
        made[int(key)] = float(by)
    return made
