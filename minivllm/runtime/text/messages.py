"""Messages of a chat in one plain form, for every way into the engine: ``LLM``, ``AsyncLLM``, the server, the command
line.

    check_messages   what a caller sends  ->  mappings without nulls, content as text or parts of text
    fit              those                ->  the forms that a chat template reads

``check_messages`` follows transformers' ``apply_chat_template``: objects become mappings, and keys whose value is null
are removed.  Content in other media is refused, since the answer would not know of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from minivllm.errors import RequestError, shown

from .template_facts import MAPPING, PARTS, TEXT, TemplateFacts

ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
WANT = 'messages: want a non-empty list of {"role": ..., "content": ...}'
# type of a part -> the field with its text; the second and third are those of OpenAI's Responses
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
NEEDS_CONTENT = ("system", "developer", "user")  # roles whose messages say nothing without content
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; the first is the usual one
MEDIA = re.compile(
    r"(input_)?(image|audio|video|file|document|media)s?(_url|_urls|_data|_embeds|_pil|_id)?|attachments?"
)
TEXT_ONLY = "this engine serves text and reads no images, audio, video or files"
# keys that clients send, with what they say elsewhere in the request or with nothing that a prompt has
KNOWN = frozenset(
    {
        "role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations",
        "id", "type", "status", "created", "created_at", "timestamp", "metadata", "cache_control", "index", "tools",
        "provider_specific_fields", "reasoning_details", "finish_reason", *REASONING,
    }
)  # fmt: skip
MEANT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
PART_KEYS = frozenset({"type", "text", "refusal", "annotations", "cache_control", "logprobs", "id"})


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a plain copy of a conversation, which ``fit`` takes.  RequestError names the place that is wrong."""
    messages = getattr(messages, "messages", messages)
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not len(messages):
        raise RequestError(WANT, "messages")
    with depth_checked():
        return [_message(_plain(message), f"messages[{i}]") for i, message in enumerate(messages)]


@contextlib.contextmanager
def depth_checked() -> Iterator[None]:
    """Raise RequestError for a conversation, or what comes with it, that is nested too deeply."""
    try:
        yield
    except RecursionError:
        raise RequestError("messages: nested too deeply", "messages") from None


def _plain(value: Any) -> Any:
    """Return mappings, lists, dataclasses and pydantic models as dicts and lists; other values as they are."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)) and not isinstance(value, type):
        return _plain(value.model_dump())
    return value


def _fail(place: str, what: str) -> RequestError:
    return RequestError(f"{place}{what}", place)


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _fail(at, f": want a mapping with role and content, not {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise _fail(f"{at}.role", f"={shown(role)}: want a word such as system, user or assistant")
    made = {key: value for key, value in message.items() if value is not None}
    for key in ("name", "tool_call_id", "refusal"):
        if not isinstance(made.get(key, ""), str):
            raise _fail(f"{at}.{key}", f"={shown(made[key])}: want a string")
    for key in [key for key in made if isinstance(key, str) and key not in KNOWN | {"audio"} and MEDIA.fullmatch(key)]:
        if made.pop(key) not in ("", [], {}, False):
            raise _fail(f"{at}.{key}", f": {TEXT_ONLY}; want text in content")
    if made.pop("audio", None):
        raise _fail(f"{at}.audio", f": {TEXT_ONLY}; want what was said as content")
    if "content" in made:
        made["content"] = _content(made["content"], f"{at}.content")
    _calls(made, at)
    refusal = made.get("refusal")
    if refusal and not made.get("content") and "tool_calls" not in made:
        made["content"] = refusal
    if role in NEEDS_CONTENT and "content" not in made:
        raise _fail(f"{at}.content", f": is missing; a message of {role} wants a string, or parts of text")
    return made


def _content(content: Any, at: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _fail(at, f"={shown(content)}: want a string, or a list of parts of text")
    return [_part(part, f"{at}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, at: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _fail(at, f'={shown(part)}: want {{"type": "text", "text": ...}}')
    part = {key: value for key, value in part.items() if value is not None}
    kind = part.get("type", "text")
    if isinstance(kind, str) and MEDIA.fullmatch(kind):
        raise _fail(f"{at}.type", f"={shown(kind)}: {TEXT_ONLY}; want text")
    for key in part:
        if isinstance(key, str) and key not in PART_KEYS and MEDIA.fullmatch(key):
            raise _fail(f"{at}.{key}", f": {TEXT_ONLY}; want parts of type text")
    if not isinstance(kind, str) or kind not in TEXTS:
        raise _fail(f"{at}.type", f"={shown(kind)}: want {', '.join(TEXTS)}")
    field = TEXTS[kind]
    if not isinstance(part.get(field), str):
        raise _fail(f"{at}.{field}", f"={shown(part.get(field))}: want a string in a part of type {kind}")
    return {**part, "type": "text"} if field == "text" else {"type": "text", "text": part[field]}


def _calls(message: dict[str, Any], at: str) -> None:
    """Put the calls of a message into one form, in place; an empty list of them says nothing."""
    calls, legacy = message.get("tool_calls"), message.pop("function_call", None)
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise _fail(f"{at}.tool_calls", f"={shown(calls)}: want a list of calls")
    if legacy is not None and not calls:  # the form that tool_calls have replaced
        if not isinstance(legacy, dict):
            raise _fail(f"{at}.function_call", f"={shown(legacy)}: want a mapping with name and arguments")
        message["tool_calls"] = [_call({"id": "call_0", "type": "function", "function": legacy}, at, "function_call")]
    elif calls:
        message["tool_calls"] = [_call(one, at, f"tool_calls[{i}]") for i, one in enumerate(calls)]
    else:
        message.pop("tool_calls", None)


def _call(call: Any, message: str, name: str) -> dict[str, Any]:
    at = f"{message}.{name}"
    if not isinstance(call, dict):
        raise _fail(at, f'={shown(call)}: want {{"function": {{"name": ..., "arguments": ...}}}}')
    made = {key: value for key, value in call.items() if value is not None}
    if made.get("type", "function") != "function":
        raise _fail(f"{at}.type", f"={shown(made['type'])}: want function")
    if not isinstance(made.get("id", ""), str):
        raise _fail(f"{at}.id", f"={shown(made['id'])}: want a string")
    nested = "function" in made or "name" not in made  # some clients leave the inner mapping out
    inside = made.get("function") if nested else made
    where = f"{at}.function" if nested and name != "function_call" else at
    if not isinstance(inside, dict):
        raise _fail(where, f"={shown(inside)}: want a mapping with name and arguments")
    inside = {key: value for key, value in inside.items() if value is not None}
    if not isinstance(inside.get("name"), str):
        raise _fail(f"{where}.name", f"={shown(inside.get('name'))}: want the name of a function")
    arguments = inside.setdefault("arguments", {})
    if not isinstance(arguments, (str, dict)):
        raise _fail(f"{where}.arguments", f"={shown(arguments)}: want JSON of an object, or the object")
    return {**made, "function": inside} if nested else inside


# ---- the forms of a template -----------------------------------------------------------------------------------------


def fit(chat: Sequence[Mapping[str, Any]], facts: TemplateFacts) -> list[dict[str, Any]]:
    """Return a checked conversation in the forms that a template reads.  RequestError if it has none for a value."""
    made = []
    for i, one in enumerate(chat):
        message, at = dict(one), f"messages[{i}]"
        _refuse_slips(message, facts, at)
        if "content" in message:
            message["content"] = _fitted_content(message["content"], facts.content)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                _fitted_call(call, facts.arguments, f"{at}.tool_calls[{k}]") for k, call in enumerate(calls)
            ]
        # a role that stands for another one where a template does not know it
        if message["role"] == "developer" and "developer" not in facts.roles:
            message["role"] = "system"
        elif message["role"] == "function" and "function" not in facts.roles:
            message["role"] = "tool"
        reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
        if reasoning is not None:  # as in transformers: a template reads one of two names
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        made.append(message)
    return made


def _refuse_slips(message: Mapping[str, Any], facts: TemplateFacts, at: str) -> None:
    for key in message:
        if key in KNOWN or key in facts.names:
            continue
        if key == "prefix" and message[key]:
            raise _fail(f"{at}.prefix", ": is not read; want continue_final_message, and no generation prompt")
        near = difflib.get_close_matches(str(key)[:64].lower(), MEANT, n=1, cutoff=0.8)
        if near and near[0] not in message:
            raise _fail(f"{at}.{str(key)[:64]}", f": unknown key; did you mean {near[0]}?")


def unread(chat: Sequence[Mapping[str, Any]], reads: Callable[[str], bool]) -> list[str]:
    """Return the places of keys that say something and that no template reads (``reads``)."""
    found = []
    for i, message in enumerate(chat):
        for key in message:
            if key not in KNOWN and not reads(str(key)):
                found.append(f"messages[{i}].{str(key)[:64]}")
        content = message.get("content")
        for k, part in enumerate(content if isinstance(content, list) else ()):
            found += [f"messages[{i}].content[{k}].{str(key)[:64]}" for key in part if key not in PART_KEYS]
    return found


def text_of(content: Any) -> str:
    """Return content as text; parts are joined by newlines, as vLLM does."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _fitted_content(content: Any, form: str) -> Any:
    if form == TEXT:
        return text_of(content)
    if form == PARTS and isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _fitted_call(call: Mapping[str, Any], form: str, at: str) -> dict[str, Any]:
    nested = "function" in call
    inside = dict(call["function"] if nested else call)
    arguments = inside["arguments"]
    if form == MAPPING and isinstance(arguments, str):
        where = f"{at}.function.arguments" if nested else f"{at}.arguments"
        inside["arguments"] = _mapping_of(arguments, where)
    elif form == TEXT and not isinstance(arguments, str):
        inside["arguments"] = _json(arguments, f"{at}.arguments")
    return {**call, "function": inside} if nested else inside


def _json(value: Any, at: str) -> str:
    """Return JSON of a caller's value.  RequestError for a value that JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # another type, or a list that holds itself
        raise _fail(at, f"={shown(value)}: want text, numbers, booleans, null, lists and mappings") from None


def _mapping_of(text: str, at: str) -> dict[str, Any]:
    """Return the object of a JSON text; an empty text is an empty object."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _fail(at, f"={shown(text)}: want JSON of an object")
    return value


# ---- tools and documents ---------------------------------------------------------------------------------------------

INTRODUCTION = (
    "You may call functions to answer. These are there, each described by JSON:\n{tools}\nTo call one, write\n"
    '<tool_call>\n{{"name": <name>, "arguments": <object of arguments>}}\n</tool_call>'
)


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return a plain copy of tools; None for none.  RequestError names the place that is wrong."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools={shown(tools)}: want a list of functions", "tools")
    made = []
    for i, tool in enumerate(tools):
        tool = _plain(tool)
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            want = 'want {"type": "function", "function": {"name": ..., "parameters": <JSON schema>}}'
            raise _fail(f"tools[{i}]", f"={shown(tool)}: {want}")
        if not isinstance(function.get("parameters") or {}, dict):
            raise _fail(f"tools[{i}].function.parameters", f"={shown(function['parameters'])}: want a JSON schema")
        made.append(tool)
    return made or None


def check_documents(documents: Any) -> list[dict[str, Any]] | None:
    """Return a plain copy of documents; None for none.  RequestError names the place that is wrong."""
    if documents is None:
        return None
    if not isinstance(documents, (list, tuple)):
        raise RequestError(f"documents={shown(documents)}: want a list of mappings with title and text", "documents")
    made = [_plain(document) for document in documents]
    for i, document in enumerate(made):
        if not isinstance(document, dict):
            raise _fail(f"documents[{i}]", f"={shown(document)}: want a mapping with title and text")
    return made or None


def tell_tools(
    chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: str = TEXT
) -> list[dict[str, Any]]:
    """Return the conversation with the tools in its system message, for a template that has no place for them.
    ``form``: in which the template reads content."""
    lines = "\n".join(_json(tool.get("function", tool), f"tools[{i}]") for i, tool in enumerate(tools))
    text = INTRODUCTION.format(tools=lines)
    first, *rest = map(dict, chat)
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": _fitted_content(text, form)}, first, *rest]
    before = text_of(first["content"])
    return [{**first, "content": _fitted_content(f"{before}\n\n{text}" if before else text, form)}, *rest]


def tell_calls(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with tool calls as text, for a template that does not print them."""
    made = []
    for i, one in enumerate(chat):
        message = dict(one)
        texts = [text_of(message.get("content"))]
        for k, call in enumerate(message.pop("tool_calls", ())):
            at = f"messages[{i}].tool_calls[{k}]"
            function = _fitted_call(call, MAPPING, at)
            function = function.get("function", function)
            body = {"name": function["name"], "arguments": function["arguments"]}
            texts.append(f"<tool_call>\n{_json(body, at)}\n</tool_call>")
        if len(texts) > 1:
            message["content"] = "\n".join(filter(None, texts))
        made.append(message)
    return made


def with_content(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the conversation with empty text for content that is missing; None if none is."""
    if all("content" in message for message in chat):
        return None
    return [{**message, "content": message.get("content", "")} for message in chat]


# ---- going on with the last message ----------------------------------------------------------------------------------

MARK = "CONTINUE_FROM_HERE "  # the space tells whether a template trims the message; a number is added where it occurs
GOES_ON = "continue_final_message"


def marked(chat: Sequence[Mapping[str, Any]], others: Any = None) -> tuple[list[dict[str, Any]], str]:
    """Return the conversation with a mark at the end of its last message, and the mark, a text that nothing else has.
    RequestError if there is nothing to continue."""
    *before, last = map(dict, chat)
    content = last.get("content")
    if content is None or content == []:
        raise RequestError(f"{GOES_ON}: the last message has no content", GOES_ON)
    taken = json.dumps([list(chat), others], ensure_ascii=False, default=str, skipkeys=True)
    mark, number = MARK, 0
    while mark.strip() in taken:
        number += 1
        mark = f"{MARK.strip()}_{number} "
    if isinstance(content, str):
        return [*before, {**last, "content": content + mark}], mark
    *parts, end = content
    return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + mark}]}], mark


def cut_at(pieces: Sequence[str], mark: str) -> tuple[str, ...]:
    """Return plain text and special tokens in turns up to the mark.  RequestError if the template does not print it."""
    word = mark.strip()
    for number in range(len(pieces) - 1, -1, -1):
        at = pieces[number].rfind(word) if number % 2 == 0 else -1
        if at >= 0:
            kept = pieces[number][:at]
            # a template that trims the message has trimmed the mark's space, and would have trimmed what is before it
            whole = pieces[number].startswith(mark, at)
            return (*pieces[:number], kept if whole else kept.rstrip())
    raise RequestError(f"{GOES_ON}: the chat template does not print the last message as it is", GOES_ON)
