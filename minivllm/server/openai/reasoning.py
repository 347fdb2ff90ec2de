"""Options of reasoning in a chat: ``reasoning_effort``, ``enable_thinking`` and their other names.

The chat template decides how a model reasons.  The options therefore become variables of the template::

    reasoning_effort, reasoning.effort      -> reasoning_effort                 if the template reads it
    enable_thinking, thinking, think,       -> enable_thinking and thinking     whichever of them it reads
    reasoning.enabled, effort none

``reasoning.max_tokens`` and ``thinking.budget_tokens`` are the parameter ``thinking_token_budget``.

An option that the template does not read has no effect, and the answer has a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from minivllm.errors import shown
from minivllm.runtime.replies.thinking import BUDGET as BUDGET
from minivllm.server.errors import ApiError

from . import JsonObject, Warnings
from .bodies import sent_names
from .fields import MOST

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
OTHER_EFFORTS = {"max": "xhigh"}  # words of Anthropic's and Ollama's APIs -> efforts
EFFORT, SWITCHES = "reasoning_effort", ("enable_thinking", "thinking")  # variables of templates
# types of values besides true and false: the name of an effort, and an object without a type
ALSO = {"think": str, "thinking": dict}
KEYS = {"reasoning": ("effort", "enabled", "exclude", "max_tokens"), "thinking": ("type", "budget_tokens")}
BUDGETS = {"reasoning": "max_tokens", "thinking": "budget_tokens"}
TYPES = {"enabled": True, "adaptive": True, "disabled": False}  # values of thinking.type


def template_variables(body: Any, read: Collection[str], warnings: Warnings) -> Any:
    """Return the variables of the chat template: those of the client, and those of the options of reasoning.

    ``read`` has the variables that the template reads.  Variables of the client take precedence.  An option without
    effect adds a warning.  ApiError (400) for malformed options and for options that contradict each other."""
    efforts = dict(_efforts(body))
    _check_same(efforts)
    switches = dict(_switches(body))
    for name, effort in efforts.items():
        switches.setdefault(name, effort != "none")
    _check_same(switches)
    own = body.chat_template_kwargs
    if not switches:
        return own
    wanted = next(iter(efforts.values()), None)
    on = next(iter(switches.values()))
    made: JsonObject = {name: on for name in SWITCHES if name in read}
    if EFFORT in read:
        if wanted is not None or not on:
            made[EFFORT] = wanted or "none"
        elif not made:
            _warn(body, warnings, switches, "the chat template reads an effort alone; send reasoning_effort")
    elif not made:
        reason = "the chat template reads neither reasoning_effort nor enable_thinking"
        _warn(body, warnings, switches, reason)
    elif on:
        reason = "the chat template reads no effort, only whether the model reasons"
        _warn(body, warnings, efforts, reason)
    if isinstance(own, Mapping):
        return {**made, **own}
    return own or made or None


def _warn(body: Any, warnings: Warnings, options: Iterable[str], reason: str) -> None:
    """Add the warning that options have no effect, under the names that the client sent."""
    sent = sent_names(body)
    for option in options:
        name = sent.get(option, option)
        warnings.append({"field": name, "message": f"{name} has no effect here: {reason}"})


def warn_unread(body: Any, warnings: Warnings) -> None:
    """Add a warning for each key of ``reasoning`` and ``thinking`` that the server does not read."""
    for name, read in KEYS.items():
        value = getattr(body, name)
        if not isinstance(value, dict):
            continue
        expected = ", ".join(read)
        for key in value.keys() - set(read):
            if value[key] is None or len(warnings) >= MOST:
                continue
            field = f"{name}.{str(key)[:64]}"
            message = f"{field} has no effect here; expected {expected}"
            warnings.append({"field": field, "message": message})


def budget_of(body: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``thinking_token_budget`` from ``reasoning.max_tokens`` or ``thinking.budget_tokens``, or {}.

    ``parameters`` has the parameters of the request so far.  ApiError (400) if they have another budget."""
    found = {BUDGET: parameters.get(BUDGET)}
    for name, key in BUDGETS.items():
        place = f"{name}.{key}"
        found[place] = _member(body, name, key)
    given = {name: value for name, value in found.items() if value is not None}
    _check_same(given)
    if not given:
        return {}
    budget = next(iter(given.values()))
    return {BUDGET: budget}


def shows_reasoning(body: Any) -> bool:
    """Return whether the answer shows the reasoning.

    It does not with ``include_reasoning=false`` or ``reasoning.exclude=true``.  ApiError (400) if ``reasoning.exclude``
    is not true or false, and if the two fields contradict each other."""
    excluded = _member(body, "reasoning", "exclude")
    if not isinstance(excluded, (bool, type(None))):
        raise ApiError(400, f"reasoning.exclude={shown(excluded)}: expected true or false", "reasoning.exclude")
    shows = {"include_reasoning": body.include_reasoning}
    shows["reasoning.exclude"] = None if excluded is None else not excluded
    given = {name: value for name, value in shows.items() if value is not None}
    _check_same(given)
    return all(given.values())


def _efforts(body: Any) -> Iterator[tuple[str, str]]:
    """Yield (field, effort) for each field of a body that requests an effort.  ApiError (400) for an unknown
    effort."""
    found = {EFFORT: body.reasoning_effort}
    found["reasoning.effort"] = _member(body, "reasoning", "effort")
    if isinstance(body.think, str):
        found["think"] = body.think
    for name, value in found.items():
        if value is None:
            continue
        if value not in EFFORTS:
            expected = ", ".join(EFFORTS)
            raise ApiError(400, f"{name}={shown(value)}: expected {expected}", name)
        yield name, value


def _switches(body: Any) -> Iterator[tuple[str, bool]]:
    """Yield (field, whether it requests reasoning) for each field of a body that controls reasoning.  ApiError (400)
    for a malformed value."""
    kind = _member(body, "thinking", "type")
    if kind is not None and kind not in tuple(TYPES):
        expected = ", ".join(TYPES)
        raise ApiError(400, f"thinking.type={shown(kind)}: expected {expected}", "thinking.type")
    found = {
        "enable_thinking": body.enable_thinking,
        "reasoning.enabled": _member(body, "reasoning", "enabled"),
        "thinking": TYPES[kind] if kind is not None else body.thinking,
        "think": body.think,
    }
    for name, value in found.items():
        if isinstance(value, bool):
            yield name, value
        elif value is not None and not isinstance(value, ALSO.get(name, bool)):
            raise ApiError(400, f"{name}={shown(value)}: expected true or false", name)


def _member(body: Any, name: str, key: str) -> Any:
    """Return the member ``key`` of the object in the body's field ``name``, or None if the field or member is missing.

    The field ``thinking`` may also be true or false, for which the result is None.  ApiError (400) if the field has any
    other value than an object."""
    value = getattr(body, name)
    if value is None or (name == "thinking" and isinstance(value, bool)):
        return None
    if not isinstance(value, dict):
        expected = "true, false or an object" if name == "thinking" else "an object"
        raise ApiError(400, f"{name}={shown(value)}: expected {expected} with {', '.join(KEYS[name])}", name)
    return value.get(key)


def _check_same(options: Mapping[str, Any]) -> None:
    """Raise ApiError (400) if two of the options, values by field, are different."""
    (first, value), *others = options.items() or [("", None)]
    for name, other in others:
        if other != value:
            raise ApiError(400, f"{first} and {name} contradict each other: send only one of them", name)
