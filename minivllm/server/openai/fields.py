"""Read the fields of a request body that its route does not declare.

Aliases become the fields of this server, fields without effect become warnings of the answer, and names that are
misspelled or cannot be served raise an error.  ``field_table.py`` lists the names.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from minivllm.core import declared_params
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.structured import FORMS
from minivllm.server.errors import ApiError

from . import JsonObject, Warnings
from .field_table import (
    ALIAS,
    BEAM_PARAMETERS,
    FORM,
    IGNORED,
    OPTIONAL,
    OTHER,
    PARAMETER,
    REFUSED,
    TAU,
    BodyField,
    names_of,
)

MOST = 32  # largest number of warnings of an answer
ENDLESS = (-1, -2)  # values of n_predict and num_predict that request the rest of the context
NESTED = ("options", "parameters", "sampling_params")  # objects of fields in Ollama, TGI and SGLang
SYNONYMS = {"max_tokens": "max_completion_tokens"}  # declared fields with the same meaning
# largest number of unknown names of a body that are compared with all known names, which takes about 1 ms each
SEARCHES = 8
SIMILARITY = 0.8  # least difflib ratio of a misspelled name: accepts max_token for max_tokens, rejects user_data
NEUTRAL = {
    **{one.name: one.default for one in fields(SamplingParams)},
    **{name: declaration.param.default for name, declaration in declared_params.builtin().items()},
}


@dataclass
class Translation:
    """A body in the field names of this server.

    ``sent`` maps a field of this server to the name under which the client sent it.  ``endless`` is set if the client
    requested as many tokens as the context can hold."""

    values: JsonObject
    warnings: Warnings = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)
    endless: bool = False

    def warn(self, name: str, reason: str) -> None:
        """Add the warning that a field has no effect."""
        self.warnings.append(_warning(name, reason))

    def set(self, alias: str, to: str, value: Any, sent: Any) -> None:
        """Set the field ``to`` to the value that an alias requests.

        A ``value`` of None only records the alias.  ApiError (400) if the body has another value for the field;
        ``sent`` is the alias's value in that message."""
        for name in (to, SYNONYMS.get(to, "")):
            other = self.values.get(name)
            if other is not None and value not in (other, [other]) and other != [value]:
                other_name = self.sent.get(name, name)
                raise _contradiction(f"{alias}={_shown(sent)}", f"{other_name}={_shown(other)}", alias)
        if value is not None:
            self.values[to] = value
        self.sent.setdefault(to, alias)


def translate(values: Mapping[str, Any], declared: Collection[str]) -> Translation:
    """Return a body in the field names of this server.

    ``declared`` has the names that are not translated: the fields of the route and the parameters of plug-ins.
    ApiError (400) for values without meaning and for contradictions; the message has the names that the client sent."""
    body = Translation(dict(values))
    _flatten(body, declared)
    for row in _rows_in(body, IGNORED, declared):
        value = body.values.pop(row.name)
        if value is not None and not _is_one_of(value, row.neutral):
            body.warn(row.name, row.text)
    for row in _rows_in(body, ALIAS, declared):
        value = body.values.pop(row.name)
        if value is not None and not _is_one_of(value, row.neutral):
            _apply_alias(body, row, value, declared)
    form = body.values.get(FORM, {})
    if FORM in body.sent and "whitespace_pattern" in form and form.keys().isdisjoint(("json", "json_object")):
        body.values[FORM] = {key: value for key, value in form.items() if key != "whitespace_pattern"} or None
        body.warn("guided_whitespace_pattern", "it applies to JSON, and the request has no form of JSON")
    return body


def _rows_in(body: Translation, use: str, declared: Collection[str]) -> list[BodyField]:
    """Return the rows of the table of fields that have the treatment ``use``, and whose names are in a body without
    being declared by its route."""
    rows = [OTHER[name] for name in body.values if name in OTHER and name not in declared]
    return [row for row in rows if row.use == use]


def _apply_alias(body: Translation, row: BodyField, value: Any, declared: Collection[str]) -> None:
    """Set the field that an alias stands for.  ApiError (400) if the body has another value for that field."""
    name = row.name
    to, _, key = row.to.partition(".")
    if to == "mirostat_tau":
        return _set_mirostat(body, name, value)
    if to == "echo" and "prompt" not in declared:
        return body.warn(name, "the answer of a chat is a separate message")
    if to == "max_tokens" and name in ("n_predict", "num_predict") and value in ENDLESS:
        body.endless = True
        return body.set(name, to, None, value)
    meaning = {key: value} if key else _converted(row, value)
    if to == FORM:
        return _merge_form(body, name, meaning)
    if name == "do_sample" and value is False:
        return _disable_sampling(body)
    if meaning is not None:
        return body.set(name, to, meaning, value)
    if name == "do_sample" and body.values.get("temperature") == 0:
        raise _contradiction(f"{name}=true", "temperature=0", name)
    return None


def _converted(row: BodyField, value: Any) -> Any:
    """Return the value of the field that an alias stands for.  ApiError (400) for a value without meaning."""
    if row.convert is None:
        return value
    try:
        return row.convert(value)
    except ValueError as exc:
        raise ApiError(400, f"{row.name}={_shown(value)}: expected {exc}", row.name) from None


def _disable_sampling(body: Translation) -> None:
    """Set the temperature to 0, and warn of another temperature.

    transformers also ignores the parameters of sampling if ``do_sample`` is false."""
    if body.values.get("temperature"):
        sent = body.sent.get("temperature", "temperature")
        body.warn(sent, "do_sample=false requests the most likely token")
    body.values["temperature"] = 0.0
    body.sent.setdefault("temperature", "do_sample")


def _flatten(body: Translation, declared: Collection[str]) -> None:
    """Move the fields of objects such as Ollama's ``options`` to the first level of a body.  ApiError (400) if one is
    not an object, or if it contradicts the first level."""
    for outer in NESTED:
        inner = body.values.get(outer)
        if outer in declared or inner is None:
            continue
        if not isinstance(inner, dict):
            raise ApiError(400, f"{outer}: expected an object of names and values", outer)
        del body.values[outer]
        for name, value in inner.items():
            row = OTHER.get(name)
            if name in declared or (row is not None and row.use in (ALIAS, IGNORED)):
                _move_up(body, outer, name, value)
            elif len(body.warnings) < MOST:
                body.warn(f"{outer}.{str(name)[:64]}", "the name is unknown")


def _move_up(body: Translation, outer: str, name: str, value: Any) -> None:
    """Set a field of the first level to its value in an object.  If the first level has the field already, ApiError
    (400) for a different value."""
    present = body.values.get(name)
    if present is None:
        body.values[name] = value
    elif value is not None and value != present:
        raise _contradiction(f"{outer}.{name}={_shown(value)}", f"{name}={_shown(present)}", name)


def _set_mirostat(body: Translation, name: str, version: Any) -> None:
    """Apply llama.cpp's version of mirostat: 0 (off), 1 (not supported) or 2 (this server's).  ApiError (400) for
    others."""
    if version == 2 and not isinstance(version, bool):
        if body.values.get("mirostat_tau") is None:
            body.values["mirostat_tau"] = TAU
        body.sent["mirostat_tau"] = name
        return
    for other in ("mirostat_tau", "mirostat_eta"):
        body.values.pop(other, None)
    if version == 1:
        body.warn(name, "this server supports version 2 only")
    elif version != 0:
        raise ApiError(400, f"{name}={_shown(version)}: expected 0, 1 or 2", name)


def _merge_form(body: Translation, name: str, part: JsonObject) -> None:
    """Add one alias's part to the form of the answer, such as guided_whitespace_pattern to guided_json.

    ApiError (400) if the body has ``structured_outputs`` itself, two forms, or two values of one part."""
    form = body.values.get(FORM)
    if form is None:
        body.values[FORM] = part
        body.sent.setdefault(FORM, name)
        return
    other = body.sent.get(FORM, FORM)
    error = ApiError(400, f"{name} and {other} contradict each other: send only one of them", name)
    if FORM not in body.sent:
        raise error
    merged = {**form, **part}
    forms = merged.keys() & set(FORMS)
    differs = any(form.get(key, value) != value for key, value in part.items())
    if differs or len(forms) > 1:
        raise error
    body.values[FORM] = merged


def check_required(values: Mapping[str, Any], model: Any) -> None:
    """Raise ApiError (400) if a body has a refused field in place of a required field.

    The message names the missing field and the replacement for the refused one.
    """
    missing = [name for name, info in model.model_fields.items() if info.is_required() and name not in values]
    for name in missing:
        for row in OTHER.values():
            if row.use != REFUSED or row.name in model.model_fields or _is_nothing(values.get(row.name)):
                continue
            raise ApiError(400, f"{name} is missing, and {row.name} is not supported: {row.text}", name)


def check(body: Any, reads: Sequence[str] = ()) -> tuple[JsonObject, Warnings]:
    """Return the parameters of ``SamplingParams`` among a body's further fields, and the warnings of the answer.

    ``reads`` lists the parameters that a processor, the sampler or a strategy of this engine reads; parameters of other
    packages are returned in ``extra``.  Raise ApiError (400) for refused and misspelled names.
    """
    translation = getattr(body, "_translation", None)
    warnings = [] if translation is None else [*translation.warnings]
    parameters: JsonObject = {}
    extra: JsonObject = {}
    unknown: list[str] = []
    for name, value in (body.model_extra or {}).items():
        row = OTHER.get(name)
        use = "" if row is None else row.use
        if row is not None and use == REFUSED and not _is_nothing(value):
            raise ApiError(400, f"{name} is not supported: {row.text}", name)
        if use == REFUSED or (value is None and use in (PARAMETER, IGNORED)):
            continue
        if use == PARAMETER:
            parameters[name] = value
        elif name in reads and name not in NEUTRAL:
            if value is not None:
                extra[name] = value
        elif use == IGNORED:
            warnings.append(_warning(name))
        else:
            unknown.append(name)
            similar = _similar(name, type(body), len(unknown) <= SEARCHES)
            if similar:
                raise ApiError(400, f"unknown field {name[:64]!r}. Did you mean {similar!r}?", name[:64])
            warnings.append({"field": name[:64], "message": "unknown field; it has no effect here"})
    if translation is not None:
        _drop_unread(parameters, warnings, reads, translation.sent)
    if extra:
        parameters["extra"] = extra
    return parameters, warnings[:MOST]


def _drop_unread(parameters: JsonObject, warnings: Warnings, reads: Sequence[str], sent: Mapping[str, str]) -> None:
    """Remove the parameters that no part of this engine reads and that clients send by habit.  Warn of their values."""
    unread = [name for name in OPTIONAL if name in parameters and name not in reads]
    for name in unread:
        if parameters.pop(name) != NEUTRAL.get(name):
            reason = f"no sampler, processor or strategy of this server reads {name}"
            names = dict.fromkeys((sent.get(name, name), name))
            warnings += [_warning(shown, reason) for shown in names]
    if parameters.get("beam_width") is not None or parameters.get("use_beam_search") not in (None, False):
        return
    for name in BEAM_PARAMETERS:
        if parameters.pop(name, NEUTRAL[name]) != NEUTRAL[name]:
            warnings.append(_warning(name, "it applies to beam search only; set beam_width"))


def warn(warnings: Warnings, name: str, reason: str = "") -> None:
    """Add the warning that a field or a place of a body has no effect, unless there are many warnings already."""
    if len(warnings) < MOST:
        warnings.append(_warning(name, reason))


def _warning(name: str, reason: str = "") -> dict[str, str]:
    """Return the warning that a field has no effect."""
    message = f"{name} has no effect here"
    return {"field": name, "message": f"{message}: {reason}" if reason else message}


def _contradiction(one: str, other: str, param: str) -> ApiError:
    """Return the error for two fields, each as "name=value", that contradict each other."""
    return ApiError(400, f"{one} and {other} contradict each other", param)


@cache
def _known_names(model: Any) -> tuple[list[str], dict[str, str]]:
    """Return the known names with which a misspelled name is compared, and a map from their letters to the names."""
    names = [*model.model_fields, *names_of(REFUSED), *names_of(PARAMETER)]
    return names, {_letters(name): name for name in (*names_of(ALIAS), *names)}


def _similar(name: str, model: Any, search: bool) -> str:
    """Return the known name that is meant by a misspelled name, or "".

    Without ``search`` only names with the same letters are found, such as top_k for topK.
    """
    names, by_letters = _known_names(model)
    found = by_letters.get(_letters(name), "")
    if found or not search:
        return found
    close = difflib.get_close_matches(name[:64], names, n=1, cutoff=SIMILARITY)
    return close[0] if close else ""


def _letters(name: str) -> str:
    """Return the letters of a name, which are the same for ``top_k``, ``topK`` and ``top-k``."""
    return name[:64].replace("_", "").replace("-", "").lower()


def _is_nothing(value: Any) -> bool:
    """Return whether a value requests nothing.  An array of token ids is a request."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a value is one of the neutral values: 0 equals 0.0, but not False."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _shown(value: Any) -> str:
    """Return a value for a message, at most 42 characters long.  Only the brackets of a list or object are shown."""
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, (int, float)):
        return json.dumps(value)[:40]
    return "{...}" if isinstance(value, dict) else "[...]"
