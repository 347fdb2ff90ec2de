"""The text of a reply in a described format, as a model writes it.  A parser of the format reads it back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .description import JSON, OBJECT, PAIRS, PYTHON, Calls, Channels, Pairs, ReplyFormat
from .values import dumped

Call = tuple[str, Mapping[str, Any]]  # (name of a function, its arguments)


def write_reply(form: ReplyFormat, thought: str = "", content: str = "", calls: Sequence[Call] = ()) -> str:
    """Return the text of a reply with reasoning, content and calls, each of which may be missing."""
    if form.channels is not None:
        return "".join(_messages(form.channels, thought, content, calls))
    text = ""
    if thought and form.reasoning is not None:
        text = f"{form.reasoning.open}{thought}\n{form.reasoning.close}{form.gap}"
    text += content
    return text + write_calls(form.calls[0], calls) if calls else text


def write_calls(spelling: Calls, calls: Iterable[Call]) -> str:
    """Return the text of calls in one spelling."""
    written = [write_call(spelling, name, arguments) for name, arguments in calls]
    return spelling.begin + spelling.between.join(written) + spelling.end


def write_call(spelling: Calls, name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of one call, with its arguments in the form of the spelling: JSON, tags, Python or quoted
    text."""
    head = spelling.head.replace("{name}", name).replace("{id}", "a1b2c3d4e")
    if spelling.arguments == OBJECT:
        text = dumped({"name": name, spelling.key: dict(arguments)})
    elif spelling.arguments == JSON:
        text = dumped(dict(arguments))
    elif spelling.arguments == PAIRS and spelling.pairs is not None:
        text = "".join(_pairs(spelling.pairs, arguments))
    elif spelling.arguments == PYTHON:
        text = ", ".join(f"{key}={_python(value)}" for key, value in arguments.items()) + ")"
    else:
        text = _quoted(dict(arguments), spelling.quote)
    return spelling.open + head + text + spelling.tail + spelling.close


def _pairs(pairs: Pairs, arguments: Mapping[str, Any]) -> Iterable[str]:
    """Yield the text of each argument between tags."""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else dumped(value)
        yield pairs.before.replace("{key}", key) + text + pairs.after


def _python(value: Any) -> str:
    """Return a JSON value as a literal of Python: None, True and False, and strings as JSON writes them."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        members = (f"{dumped(key)}: {_python(member)}" for key, member in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_python, value)) + "]"
    return dumped(value)


def _quoted(value: Any, quote: str) -> str:
    """Return a value as text: strings stand between ``quote`` tags, and keys have no quotes."""
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, Mapping):
        members = (f"{key}:{_quoted(member, quote)}" for key, member in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_quoted(element, quote) for element in value) + "]"
    return dumped(value)


def _messages(channels: Channels, thought: str, content: str, calls: Sequence[Call]) -> Iterable[str]:
    """Yield the messages of a reply.  The prompt has the start of the first one."""
    again = ""
    end = channels.ends[0]
    start = channels.start + channels.role
    if thought:
        yield f"{channels.channel}{channels.thoughts[0]}{channels.message}{thought}{end}"
        again = start
    if content and not calls:
        yield f"{again}{channels.channel}{channels.content}{channels.message}{content}"
    elif content:
        yield f"{again}{channels.channel}{channels.calls}{channels.message}{content}{end}"
        again = start
    for name, arguments in calls:
        head = f"{channels.channel}{channels.calls} {channels.recipient}{name} {channels.constrain}json"
        yield f"{again}{head}{channels.message}{dumped(dict(arguments))}{channels.ends[1]}"
        again = start
