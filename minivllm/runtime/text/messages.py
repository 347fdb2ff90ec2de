"""Checks and conversion of chat messages for all interfaces: ``LLM``, ``AsyncLLM``, the server, the command line.

    check_messages   messages of a caller  ->  mappings without nulls, with content as text or parts of text
    fit              checked messages      ->  the forms that a chat template reads

``check_messages`` follows transformers' ``apply_chat_template``: objects become mappings, and keys whose value is null
are removed.  Images and other media are refused, because the model would not see them; ``image_parts`` has replaced the
images that are read by placeholders.
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

from .image_parts import is_placeholder
from .template_facts import MAPPING, PARTS, TEXT, TemplateFacts

Message = dict[str, Any]
Chat = Sequence[Mapping[str, Any]]  # a conversation, or another list of objects in a request
ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
WANT = 'messages: expected a non-empty list of {"role": ..., "content": ...}'
# type of a part -> field with its text; input_text and output_text are types of OpenAI's Responses API
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
NEEDS_CONTENT = ("system", "developer", "user")  # roles whose messages must have content
# names of the field with the reasoning, the usual name first
REASONING = ("reasoning_content", "thinking", "reasoning")
MEDIA = re.compile(
    r"(input_)?(image|audio|video|file|document|media)s?(_url|_urls|_data|_embeds|_pil|_id)?|attachments?"
)
TEXT_ONLY = (
    "it is not read here; models with an image encoder read images in user messages of chats, and none reads audio, "
    "video or files"
)
# keys without a warning, because their data are in the prompt or do not concern the prompt
KNOWN = frozenset(
    {
        "role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations",
        "id", "type", "status", "created", "created_at", "timestamp", "metadata", "cache_control", "index", "tools",
        "provider_specific_fields", "reasoning_details", "finish_reason", *REASONING,
    }
)  # fmt: skip
MEANT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
SCALARS = frozenset({str, int, float, bool, type(None)})
PART_KEYS = frozenset({"type", "text", "refusal", "annotations", "cache_control", "logprobs", "id", "placeholder"})


def check_messages(messages: Any) -> list[Message]:
    """Return a plain copy of a conversation, for ``fit``.  RequestError names the wrong place."""
    messages = getattr(messages, "messages", messages)
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not len(messages):
        raise RequestError(WANT, "messages")
    with depth_checked():
        return [_message(_plain(message), f"messages[{i}]") for i, message in enumerate(messages)]


@contextlib.contextmanager
def depth_checked() -> Iterator[None]:
    """Raise RequestError in place of RecursionError, for data of a request that is nested too deeply."""
    try:
        yield
    except RecursionError:
        raise RequestError("messages: lists or objects are nested too deeply; use fewer levels", "messages") from None


def _plain(value: Any) -> Any:
    """Return a value with its mappings, lists, dataclasses and pydantic models converted to dicts and lists."""
    # a body may have 100,000 scalars, so scalars are copied without a function call
    if isinstance(value, (dict, Mapping)):
        return {key: one if type(one) in SCALARS else _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [one if type(one) in SCALARS else _plain(one) for one in value]
    if type(value) in SCALARS:
        return value
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)) and not isinstance(value, type):
        return _plain(value.model_dump())
    return value


def _fail(place: str, text: str) -> RequestError:
    """Return the error about a place of the conversation."""
    return RequestError(f"{place}{text}", place)


def _not_null(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return a mapping without the keys whose value is None.  The mapping itself is returned if there are none."""
    for value in mapping.values():
        if value is None:
            return {key: value for key, value in mapping.items() if value is not None}
    return mapping


def _message(message: Any, at: str) -> Message:
    """Return a checked copy of a message.  ``at`` is its place for errors.  RequestError if it is malformed or has
    media."""
    if not isinstance(message, dict):
        raise _fail(at, f": expected a mapping with role and content, not {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise _fail(f"{at}.role", f"={shown(role)}: expected a word such as system, user or assistant")
    checked = _not_null(message)
    for key in ("name", "tool_call_id", "refusal", *REASONING):
        if not isinstance(checked.get(key, ""), str):
            raise _fail(f"{at}.{key}", f"={shown(checked[key])}: expected a string")
    media = [key for key in checked if isinstance(key, str) and key not in KNOWN and MEDIA.fullmatch(key)]
    for key in media:
        if checked.pop(key) not in ("", [], {}, False):
            raise _fail(f"{at}.{key}", f": {TEXT_ONLY}; send text in content")
    if checked.pop("audio", None):
        raise _fail(f"{at}.audio", f": {TEXT_ONLY}; send the spoken text as content")
    if "content" in checked:
        checked["content"] = _content(checked["content"], f"{at}.content")
    _calls(checked, at)
    refusal = checked.get("refusal")
    if refusal and not checked.get("content") and "tool_calls" not in checked:
        checked["content"] = refusal
    if role in NEEDS_CONTENT and "content" not in checked:
        raise _fail(f"{at}.content", f": is missing; expected a string or parts of text in a message of {role}")
    return checked


def _content(content: Any, at: str) -> str | list[Message]:
    """Return checked content: text, or a list of parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _fail(at, f"={shown(content)}: expected a string, or a list of parts of text")
    return [_part(part, f"{at}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, at: str) -> Message:
    """Return a checked part of content, with the type "text", or a placeholder of an image unchanged.  RequestError for
    other parts."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _fail(at, f'={shown(part)}: expected {{"type": "text", "text": ...}}')
    kind = part.get("type", "text")
    if len(part) == 2 and isinstance(kind, str) and TEXTS.get(kind) == "text" and isinstance(part.get("text"), str):
        part["type"] = "text"  # most parts; a message may have 100,000
        return part
    if is_placeholder(part):
        return part
    part = _not_null(part)
    kind = part.get("type", "text")
    if isinstance(kind, str) and kind not in TEXTS and MEDIA.fullmatch(kind):
        raise _fail(f"{at}.type", f"={shown(kind)}: {TEXT_ONLY}; send text")
    for key in part.keys() - PART_KEYS:
        if isinstance(key, str) and MEDIA.fullmatch(key):
            raise _fail(f"{at}.{key}", f": {TEXT_ONLY}; send parts of type text")
    if not isinstance(kind, str) or kind not in TEXTS:
        raise _fail(f"{at}.type", f"={shown(kind)}: expected {', '.join(TEXTS)}")
    field = TEXTS[kind]
    if not isinstance(part.get(field), str):
        raise _fail(f"{at}.{field}", f"={shown(part.get(field))}: expected a string in a part of type {kind}")
    return {**part, "type": "text"} if field == "text" else {"type": "text", "text": part[field]}


def _calls(message: Message, at: str) -> None:
    """Replace the tool calls of a message by checked copies, and remove an empty list of calls."""
    calls = message.get("tool_calls")
    legacy = message.pop("function_call", None)
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise _fail(f"{at}.tool_calls", f"={shown(calls)}: expected a list of calls")
    if legacy is not None and not calls:  # ``function_call`` is the older form of tool_calls
        if not isinstance(legacy, dict):
            raise _fail(f"{at}.function_call", f"={shown(legacy)}: expected a mapping with name and arguments")
        message["tool_calls"] = [_call({"id": "call_0", "type": "function", "function": legacy}, at, "function_call")]
    elif calls:
        message["tool_calls"] = [_call(call, at, f"tool_calls[{i}]") for i, call in enumerate(calls)]
    else:
        message.pop("tool_calls", None)


def _call(call: Any, message: str, name: str) -> Message:
    """Return a checked copy of a call.  ``message`` is the place of the message, ``name`` that of the call in it."""
    at = f"{message}.{name}"
    if not isinstance(call, dict):
        raise _fail(at, f'={shown(call)}: expected {{"function": {{"name": ..., "arguments": ...}}}}')
    checked = _not_null(call)
    if checked.get("type", "function") != "function":
        raise _fail(f"{at}.type", f"={shown(checked['type'])}: expected function")
    if not isinstance(checked.get("id", ""), str):
        raise _fail(f"{at}.id", f"={shown(checked['id'])}: expected a string")
    nested = "function" in checked or "name" not in checked  # some clients omit the inner mapping
    inside = checked.get("function") if nested else checked
    where = f"{at}.function" if nested and name != "function_call" else at
    if not isinstance(inside, dict):
        raise _fail(where, f"={shown(inside)}: expected a mapping with name and arguments")
    inside = _not_null(inside)
    if not isinstance(inside.get("name"), str):
        raise _fail(f"{where}.name", f"={shown(inside.get('name'))}: expected the name of a function")
    arguments = inside.setdefault("arguments", {})
    if not isinstance(arguments, (str, dict)):
        raise _fail(f"{where}.arguments", f"={shown(arguments)}: expected JSON of an object, or the object")
    if nested:
        checked["function"] = inside
        return checked
    return inside


# ---- the forms of a template -----------------------------------------------------------------------------------------


def fit(chat: Chat, facts: TemplateFacts) -> list[Message]:
    """Return a checked conversation in the forms that a template reads.

    RequestError for misspelled keys, and for values without such a form."""
    made = []
    for i, original in enumerate(chat):
        message = dict(original)
        at = f"messages[{i}]"
        _refuse_slips(message, facts, at)
        if "content" in message:
            message["content"] = _fitted_content(message["content"], facts.content)
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [
                _fitted_call(call, facts.arguments, f"{at}.tool_calls[{k}]") for k, call in enumerate(calls)
            ]
        # replace a role that the template does not support
        if message["role"] == "developer" and "developer" not in facts.roles:
            message["role"] = "system"
        elif message["role"] == "function" and "function" not in facts.roles:
            message["role"] = "tool"
        reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
        if reasoning is not None:  # stored under two names, because a template reads one of them, as in transformers
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
            if calls and facts.calls_have_one_text:
                _join_texts(message)
        made.append(message)
    return made


def _join_texts(message: Message) -> None:
    """Move the content of a message to the end of its reasoning, for a template that refuses both with calls."""
    content = text_of(message.get("content"))
    if content and isinstance(message["thinking"], str):
        message["thinking"] = f"{message['thinking']}\n\n{content}"
        message["content"] = ""


def _refuse_slips(message: Mapping[str, Any], facts: TemplateFacts, at: str) -> None:
    """Raise RequestError for keys of a message that are probably misspelled, and for ``prefix``."""
    for key in message:
        if key in KNOWN or key in facts.names:
            continue
        if key == "prefix" and message[key]:
            raise _fail(f"{at}.prefix", ": is not supported; use continue_final_message, and no generation prompt")
        near = difflib.get_close_matches(str(key)[:64].lower(), MEANT, n=1, cutoff=0.8)
        if near and near[0] not in message:
            raise _fail(f"{at}.{str(key)[:64]}", f": unknown key; did you mean {near[0]}?")


def unread(chat: Chat, reads: Callable[[str], bool]) -> list[str]:
    """Return the places of keys that have no effect.  ``reads`` returns whether a template reads a key."""
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
    """Return content as text.  Parts are joined by newlines, as in vLLM, and placeholders of images are left out."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""


def _fitted_content(content: Any, form: str) -> Any:
    """Return content in the form that a template reads.  RequestError for an image if the template has no place for
    it."""
    if form == TEXT:
        if isinstance(content, list) and any(is_placeholder(part) for part in content):
            raise RequestError("messages: the chat template has no place for images; leave them out", "messages")
        return text_of(content)
    if form == PARTS and isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _fitted_call(call: Mapping[str, Any], form: str, at: str) -> Message:
    """Return a call with its arguments in the form that a template reads."""
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
    """Return a value as JSON text.  RequestError for a value that JSON cannot express."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # a value of another type, or a list that contains itself
        raise _fail(at, f"={shown(value)}: expected text, numbers, booleans, null, lists and mappings") from None


def _mapping_of(text: str, at: str) -> Message:
    """Return the object in a JSON text.  An empty text is an empty object.  RequestError if it is not the JSON of an
    object."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _fail(at, f"={shown(text)}: expected JSON of an object")
    return value


# ---- tools and documents ---------------------------------------------------------------------------------------------

INTRODUCTION = (
    "You may call functions to answer. These are there, each described by JSON:\n{tools}\nTo call one, write\n"
    '<tool_call>\n{{"name": <name>, "arguments": <object of arguments>}}\n</tool_call>'
)


def check_tools(tools: Any) -> list[Message] | None:
    """Return a plain copy of tools, or None without tools.  RequestError names the wrong place."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools={shown(tools)}: expected a list of functions", "tools")
    made = []
    for i, tool in enumerate(tools):
        tool = _plain(tool)
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = '{"type": "function", "function": {"name": ..., "parameters": <JSON schema>}}'
            raise _fail(f"tools[{i}]", f"={shown(tool)}: expected {expected}")
        if not isinstance(function.get("parameters") or {}, dict):
            raise _fail(f"tools[{i}].function.parameters", f"={shown(function['parameters'])}: expected a JSON schema")
        made.append(tool)
    return made or None


def check_documents(documents: Any) -> list[Message] | None:
    """Return a plain copy of documents, or None without documents.  RequestError names the wrong place."""
    if documents is None:
        return None
    if not isinstance(documents, (list, tuple)):
        text = f"documents={shown(documents)}: expected a list of mappings with title and text"
        raise RequestError(text, "documents")
    made = [_plain(document) for document in documents]
    for i, document in enumerate(made):
        if not isinstance(document, dict):
            raise _fail(f"documents[{i}]", f"={shown(document)}: expected a mapping with title and text")
    return made or None


def tools_as_text(chat: Chat, tools: Chat, form: str = TEXT) -> list[Message]:
    """Return the conversation with the tools in its system message, for a template without support of tools.

    ``form`` is the form in which the template reads content."""
    lines = "\n".join(_json(tool.get("function", tool), f"tools[{i}]") for i, tool in enumerate(tools))
    text = INTRODUCTION.format(tools=lines)
    first, *rest = map(dict, chat)
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": _fitted_content(text, form)}, first, *rest]
    before = text_of(first["content"])
    if before:
        text = f"{before}\n\n{text}"
    return [{**first, "content": _fitted_content(text, form)}, *rest]


def calls_as_text(chat: Chat) -> list[Message]:
    """Return the conversation with tool calls as text, for a template that does not print them."""
    made = []
    for i, original in enumerate(chat):
        message = dict(original)
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


def with_content(chat: Chat) -> list[Message] | None:
    """Return the conversation with empty text for missing content, or None if no content is missing."""
    if all("content" in message for message in chat):
        return None
    return [{**message, "content": message.get("content", "")} for message in chat]


# ---- continuation of the last message --------------------------------------------------------------------------------

MARK = "CONTINUE_FROM_HERE "  # the space shows whether a template trims the message; a number makes the mark unique
GOES_ON = "continue_final_message"


def marked(chat: Chat, others: Any = None) -> tuple[list[Message], str]:
    """Return the conversation with a mark at the end of its last message, and the mark.

    The mark is a text that occurs nowhere else.  RequestError if the last message has no content."""
    *before, last = [dict(message) for message in chat]
    content = last.get("content")
    if content is None or content == []:
        raise RequestError(f"{GOES_ON}: the last message has no content; add the beginning of the answer", GOES_ON)
    if isinstance(content, list) and is_placeholder(content[-1]):
        raise RequestError(f"{GOES_ON}: the last message ends with an image; expected text", GOES_ON)
    taken = json.dumps([list(chat), others], ensure_ascii=False, default=str, skipkeys=True)
    mark = MARK
    number = 0
    while mark.strip() in taken:
        number += 1
        mark = f"{MARK.strip()}_{number} "
    if isinstance(content, str):
        return [*before, {**last, "content": content + mark}], mark
    *parts, end = content
    marked_end = {**end, "text": end["text"] + mark}
    return [*before, {**last, "content": [*parts, marked_end]}], mark


def cut_at(pieces: Sequence[str], mark: str) -> tuple[str, ...]:
    """Return plain text and special tokens, in turn, up to the mark.  RequestError if the mark is missing."""
    word = mark.strip()
    for number in range(len(pieces) - 1, -1, -1):
        at = pieces[number].rfind(word) if number % 2 == 0 else -1
        if at >= 0:
            kept = pieces[number][:at]
            # a template that has trimmed the mark's space would also have trimmed the space before the mark
            whole = pieces[number].startswith(mark, at)
            return (*pieces[:number], kept if whole else kept.rstrip())
    raise RequestError(
        f"{GOES_ON}: the chat template does not print the last message as it is; leave {GOES_ON} out", GOES_ON
    )
