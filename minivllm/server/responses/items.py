"""Convert the items of a Responses input to the messages of a chat.

    reasoning, message of the assistant, function_call, ...   ->  one message of the assistant
    function_call_output                                      ->  a message of the role tool
    instructions and the first messages of system, developer  ->  one message at the begin

Many chat templates accept instructions only in the first message, so the first ones are joined.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import RequestError, shown
from minivllm.runtime.text.messages import check_messages, text_of
from minivllm.server.errors import ApiError, wrong
from minivllm.server.openai import JsonObject, Warnings, fields
from minivllm.server.openai.answers import Slices

from .tools import INPUT, chat_name

MOST_ITEMS = 4096  # largest number of items of a conversation, as many as a chat may have messages
MOST_SEALED = 1 << 20  # largest number of characters of an encrypted content, more than a model's reasoning has
ROLES = ("system", "developer", "user", "assistant")
CALLS, OUTPUTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")
REFERENCE = "item_reference"
KINDS = ("message", "reasoning", *CALLS, *OUTPUTS, REFERENCE)
# keys of items that are read, or that an answer has and clients send back
KEYS = frozenset(
    {
        "type", "id", "role", "content", "status", "summary", "encrypted_content", "call_id", "name", "arguments",
        "output", "input", "namespace", "phase", "created_by", "caller",
    }
)  # fmt: skip


class ItemConversation:
    """The messages of a chat, made from items.

    ``places`` maps the place of each message and call in the chat, such as "messages[3]", to its place in the body."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[JsonObject] = []
        self.places: dict[str, str] = {}
        self.warnings: Warnings = []
        self._opening = True  # whether all messages so far are instructions
        # the leading messages of system and developer, which are joined to one message
        self._instructions: list[str] = []
        if instructions is not None:
            self._append({"role": "system", "content": instructions}, "instructions")
            self._instructions.append(instructions)

    async def extend(self, items: Sequence[JsonObject], at: str, slices: Slices) -> None:
        """Add items to the conversation, and let other tasks run meanwhile.  ``at`` is the name of their list for
        errors."""
        until = slices.begin()
        for number, item in enumerate(items):
            self._add(item, f"{at}[{number}]")
            if time.perf_counter() > until:
                until = await slices.next()
        if self._instructions:
            self.messages[0]["content"] = "\n\n".join(self._instructions)

    def _add(self, item: JsonObject, at: str) -> None:
        """Add one item.  ApiError (400) names the wrong place."""
        kind = item.get("type")
        for key in item.keys() - KEYS:
            if item[key] is not None:
                fields.warn(self.warnings, f"{at}.{str(key)[:64]}")
        if kind == "message":
            self._add_message(item, at)
        elif kind == "reasoning":
            thought = _thought(item)
            if not thought and item.get("encrypted_content"):
                fields.warn(self.warnings, f"{at}.encrypted_content", "only the server that made it can read it")
            if thought:
                self._assistant("reasoning_content", at)["reasoning_content"] = thought
        elif kind in CALLS:
            self._add_call(item, at)
        else:
            call = _text(item, "call_id", at)
            message = {"role": "tool", "tool_call_id": call, "content": item.get("output")}
            self._append(_checked(message, at, ".output"), at)

    def _add_call(self, item: Mapping[str, Any], at: str) -> None:
        """Add the call of an item."""
        calls = self._assistant("tool_calls", at).setdefault("tool_calls", [])
        self.places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}].function"] = at
        calls.append(_call(item, at))

    def _add_message(self, item: Mapping[str, Any], at: str) -> None:
        """Add the message of an item.  ApiError (400) for an unknown role or malformed content."""
        role = item.get("role")
        if role not in ROLES:
            raise wrong(f"{at}.role", f"={shown(role)}: expected one of {', '.join(ROLES)}")
        message = _checked({"role": role, "content": item.get("content")}, at, ".content")
        if role == "assistant":
            self._assistant("content", at)["content"] = message["content"]
            return
        instructs = self._opening and role in ("system", "developer")
        if instructs:
            self._instructions.append(message["content"])
        if not instructs or not self.messages:
            self._append(message, at)

    def _append(self, message: JsonObject, at: str) -> None:
        """Append a message that is complete."""
        self.places[f"messages[{len(self.messages)}]"] = at
        self.messages.append(message)
        self._opening = self._opening and message["role"] in ("system", "developer")

    def _assistant(self, key: str, at: str) -> JsonObject:
        """Return the last message if the next item continues it under ``key``, else a new message of the assistant.

        A message has its reasoning, its text and its calls, in this order.
        """
        order = ("reasoning_content", "content", "tool_calls")
        last = self.messages[-1] if self.messages else {}
        taken = [name for name in order if name in last]
        continues = last.get("role") == "assistant" and all(order.index(name) < order.index(key) for name in taken)
        if key == "tool_calls" and last.get("role") == "assistant":
            continues = True
        if not continues:
            last = {"role": "assistant"}
            self._append(last, at)
        return last


def _checked(message: JsonObject, at: str, field: str) -> JsonObject:
    """Return a checked copy of a message.  ``field`` is the item's field with the content."""
    if message["content"] is None:
        raise wrong(at + field, ": expected a string or a list of parts of text")
    try:
        checked = check_messages([message])[0]
    except RequestError as exc:
        text, param = str(exc), exc.param or ""
        text, param = (value.replace("messages[0].content", at + field) for value in (text, param))
        raise ApiError(400, text, param) from None
    return {**checked, "content": text_of(checked["content"])}


def _text(item: Mapping[str, Any], key: str, at: str) -> str:
    """Return a text of an item.  ApiError (400) if it is missing."""
    value = item.get(key)
    if not isinstance(value, str):
        raise wrong(f"{at}.{key}", f"={shown(value)}: expected a string")
    return value


def _call(item: Mapping[str, Any], at: str) -> JsonObject:
    """Return the call of an item as a chat has it."""
    name = chat_name(_text(item, "name", at), item.get("namespace"))
    if item["type"] == "function_call":
        arguments = _text(item, "arguments", at)
    else:
        arguments = json.dumps({INPUT: _text(item, "input", at)}, ensure_ascii=False)
    return {"id": _text(item, "call_id", at), "type": "function", "function": {"name": name, "arguments": arguments}}


def _thought(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item, which is its content, or else its encrypted content, or else its summary."""
    for key in ("content", "encrypted_content", "summary"):
        value = item.get(key)
        if isinstance(value, str):
            value = [{"text": unsealed(value) if key == "encrypted_content" else value}]
        parts = value if isinstance(value, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        found = "".join(text for text in texts if isinstance(text, str))
        if found:
            return found
    return ""


def sealed(text: str) -> str:
    """Return the ``encrypted_content`` of a reasoning text.

    It is no secret from the client, which also has the text, so it is only encoded."""
    return base64.b64encode(text.encode("utf-8", "replace")).decode()


def unsealed(text: str) -> str:
    """Return the reasoning text in an ``encrypted_content``, or "" if another server made it."""
    if len(text) > MOST_SEALED:
        return ""
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def listed(value: Any, prefix: str) -> list[JsonObject]:
    """Return the input of a body as a list of items that have an id.  ApiError (400) for another form.

    ``prefix`` makes the ids of items without one, as "msg_PREFIX_i0"."""
    if isinstance(value, str):
        value = [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", ": expected a text or a list of items")
    if len(value) > MOST_ITEMS:
        raise wrong("input", f": {len(value)} items; expected at most {MOST_ITEMS}")
    return [_with_id(item, number, prefix) for number, item in enumerate(value)]


def _with_id(item: Any, number: int, prefix: str) -> JsonObject:
    """Return an item with its type and an id, and with the content of a message as a list.  ApiError (400) for a
    malformed item."""
    at = f"input[{number}]"
    if not isinstance(item, dict):
        raise wrong(at, f"={shown(item)}: expected an item")
    kind = item.get("type")
    if kind is None and ("role" in item or "id" in item):
        kind = "message" if "role" in item else REFERENCE
    if kind not in KINDS:
        raise wrong(f"{at}.type", f"={shown(kind)}: expected one of {', '.join(KINDS)}")
    ident = item.get("id")
    if not isinstance(ident, (str, type(None))):
        raise wrong(f"{at}.id", f"={shown(ident)}: expected a string")
    if not ident:
        start = PREFIXES.get(str(kind), "item")
        ident = f"{start}_{prefix}_i{number}"
    made = {"type": kind, **item, "id": ident}
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part: JsonObject = {"type": "input_text", "text": content}
        if item.get("role") == "assistant":
            part.update(type="output_text", annotations=[])
        made["content"] = [part]
    if kind in ("message", *CALLS, *OUTPUTS):
        made.setdefault("status", "completed")
    return made


PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc",
    "function_call_output": "fco", "custom_tool_call_output": "ctco",
}  # fmt: skip
