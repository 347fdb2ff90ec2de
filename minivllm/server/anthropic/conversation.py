"""Convert Anthropic's system prompt and messages, which are made of blocks, to the messages of a chat.

    user       tool_result blocks become messages of role tool, text becomes a message of role user
    assistant  text, thinking and tool_use blocks become one message with content, reasoning_content and tool_calls

Consecutive messages of one role are one turn.  A last turn of the assistant is continued by the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import shown
from minivllm.runtime.text.messages import TEXT_ONLY
from minivllm.server.errors import wrong
from minivllm.server.openai import JsonObject, Warnings
from minivllm.server.openai.fields import warn

ROLES = ("user", "assistant", "system")
# role -> block type -> keys that the server reads, or that do not concern the prompt
COMMON = frozenset({"type", "cache_control"})
TEXT_KEYS = COMMON | {"text", "citations"}
BLOCKS: dict[str, dict[str, frozenset[str]]] = {
    "user": {
        "text": TEXT_KEYS,
        "image": COMMON | {"source"},
        "tool_result": COMMON | {"tool_use_id", "content", "is_error"},
    },
    "assistant": {
        "text": TEXT_KEYS,
        "tool_use": COMMON | {"id", "name", "input", "caller"},
        "thinking": COMMON | {"thinking", "signature"},
        "redacted_thinking": COMMON | {"data"},
    },
    "system": {"text": TEXT_KEYS},
}
RESULT = {"text": TEXT_KEYS}  # blocks of the content of a tool_result
MEDIA = ("image", "document", "audio", "video", "container_upload", "search_result")
OF_MESSAGE = frozenset({"role", "content"})
MOST_BLOCKS = 4096  # largest number of blocks of all messages together; each block is at most one message of the chat


@dataclass
class Turn:
    """Consecutive messages of one role: their blocks, each with its place in the body."""

    role: str
    place: str
    blocks: list[tuple[JsonObject, str]] = field(default_factory=list)


@dataclass
class Conversation:
    """The messages of a chat.  ``continues`` is set if the answer continues the last message."""

    messages: list[JsonObject]
    continues: bool


def read_conversation(messages: Any, system: Any, warnings: Warnings, images: bool = False) -> Conversation:
    """Return the chat of a body's messages and system prompt.  ``images`` means that the engine reads them.

    ApiError (400) names the first wrong place.  Places without effect are added to ``warnings``."""
    turns = _turns(messages, system, warnings, images)
    continues = turns[-1].role == "assistant"
    if continues and not _has_content(turns[-1].blocks):
        continues = False  # an empty last message of the assistant has no effect, so the answer does not continue it
        turns.pop()
    if not any(turn.role != "system" for turn in turns):
        raise wrong("messages", ": expected a message of role user")
    chat: list[JsonObject] = []
    names: dict[str, str] = {}  # id of a tool_use block -> name of the tool
    for turn in turns:
        if turn.role == "assistant":
            chat.append(_assistant(turn, names, warnings))
            continue
        results, texts = _results_and_texts(turn, names, warnings)
        chat += results
        if texts:
            chat.append({"role": turn.role, "content": _content(texts)})
    if continues:
        _check_continued(turns[-1], chat[-1])
    return Conversation(chat, continues)


def _turns(messages: Any, system: Any, warnings: Warnings, images: bool) -> list[Turn]:
    """Return the turns of a body.  The system prompt is the first.  ApiError (400) for malformed messages."""
    if not isinstance(messages, list) or not messages:
        expected = 'a non-empty list of {"role": "user" or "assistant", "content": ...}'
        raise wrong("messages", f": expected {expected}")
    _check_count(messages, system)
    turns: list[Turn] = []
    if system not in (None, "", []):
        turns.append(Turn("system", "system", _blocks(system, "system", BLOCKS["system"], warnings)))
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise wrong(place, f"={shown(message)}: expected an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            raise wrong(f"{place}.role", f"={shown(role)}: expected {', '.join(ROLES)}")
        _warn_unread(message, place, OF_MESSAGE, warnings)
        kinds = BLOCKS[role] if images else {kind: keys for kind, keys in BLOCKS[role].items() if kind != "image"}
        blocks = _blocks(message.get("content"), f"{place}.content", kinds, warnings)
        last = number == len(messages) - 1
        if not _has_content(blocks) and not (last and role == "assistant"):
            raise wrong(f"{place}.content", ": is empty; expected text or blocks")
        if not turns or turns[-1].role != role:
            turns.append(Turn(role, place))
        turns[-1].blocks += blocks
    return turns


def _check_count(messages: list[Any], system: Any) -> None:
    """Raise ApiError (400) for too many blocks, because the event loop reads them."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    lists = [content for content in (system, *contents) if isinstance(content, list)]
    for content in tuple(lists):
        inner = [block.get("content") for block in content if isinstance(block, dict)]
        lists += [more for more in inner if isinstance(more, list)]
    count = len(messages) + sum(map(len, lists))
    if count > MOST_BLOCKS:
        raise wrong("messages", f": {count} messages and blocks; expected at most {MOST_BLOCKS} together")


def _has_content(blocks: Iterable[tuple[JsonObject, str]]) -> bool:
    """Return whether some of the blocks have content.  An empty text has none."""
    return any(block["type"] != "text" or block["text"] for block, _ in blocks)


def _blocks(
    content: Any, place: str, kinds: Mapping[str, frozenset[str]], warnings: Warnings
) -> list[tuple[JsonObject, str]]:
    """Return the blocks of content, each with its place in the body.  A text is one block.  ApiError (400) for
    malformed blocks.

    ``kinds`` maps the accepted types of blocks to their keys."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, place)]
    if not isinstance(content, list):
        raise wrong(place, f"={shown(content)}: expected a string or a list of blocks")
    found = []
    for number, block in enumerate(content):
        at = f"{place}[{number}]"
        if not isinstance(block, dict):
            raise wrong(at, f"={shown(block)}: expected an object with a type")
        kind = block.get("type")
        if kind in MEDIA and kind not in kinds:
            raise wrong(f"{at}.type", f"={shown(kind)}: {TEXT_ONLY}; send its text in a block of type text")
        if not isinstance(kind, str) or kind not in kinds:
            raise wrong(f"{at}.type", f"={shown(kind)}: expected {', '.join(kinds)}")
        if kind == "text" and not isinstance(block.get("text"), str):
            raise wrong(f"{at}.text", f"={shown(block.get('text'))}: expected a string")
        _warn_unread(block, at, kinds[kind], warnings)
        found.append((block, at))
    return found


def _warn_unread(values: Mapping[str, Any], place: str, read: frozenset[str], warnings: Warnings) -> None:
    """Add a warning for each key with a value that the server does not read."""
    if values.keys() <= read:
        return
    for key, value in values.items():
        if key not in read and value is not None:
            warn(warnings, f"{place}.{key[:64]}", "the key is unknown")


def _content(texts: Sequence[Any]) -> Any:
    """Return texts and image blocks as the content of a message: a string, or several parts."""
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return [{"type": "text", "text": text} if isinstance(text, str) else text for text in texts]


def _results_and_texts(turn: Turn, names: Mapping[str, str], warnings: Warnings) -> tuple[list[JsonObject], list[Any]]:
    """Return the tool results of a turn as messages of role tool, and its texts and image blocks."""
    results = []
    texts: list[Any] = []
    for block, place in turn.blocks:
        if block["type"] == "tool_result":
            results.append(_result(block, place, names, warnings))
        elif block["type"] == "image":
            texts.append({"type": "image", "source": block.get("source")})
        elif block["text"]:
            texts.append(block["text"])
    return results, texts


def _result(block: JsonObject, place: str, names: Mapping[str, str], warnings: Warnings) -> JsonObject:
    """Return a tool_result block as a message of role tool.  An error is marked in its text."""
    ident = block.get("tool_use_id")
    if not isinstance(ident, str) or ident not in names:
        expected = "the id of a tool_use block of an earlier message of the assistant"
        raise wrong(f"{place}.tool_use_id", f"={shown(ident)}: expected {expected}")
    is_error = block.get("is_error")
    if not isinstance(is_error, (bool, type(None))):
        raise wrong(f"{place}.is_error", f"={shown(is_error)}: expected true or false")
    content = block.get("content")
    blocks = [] if content is None else _blocks(content, f"{place}.content", RESULT, warnings)
    texts = [inner["text"] for inner, _ in blocks if inner["text"]]
    if is_error:  # chat templates have no mark for failed calls
        texts[:1] = [f"Error: {texts[0]}" if texts else "Error"]
    return {"role": "tool", "tool_call_id": ident, "name": names[ident], "content": _content(texts or [""])}


def _assistant(turn: Turn, names: dict[str, str], warnings: Warnings) -> JsonObject:
    """Return a turn of the assistant as one message of a chat.  Add the ids of its tool_use blocks to ``names``.
    ApiError (400) for a malformed block."""
    texts = []
    thoughts = []
    calls = []
    for block, place in turn.blocks:
        kind = block["type"]
        if kind == "text" and block["text"]:
            texts.append(block["text"])
        elif kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise wrong(f"{place}.thinking", f"={shown(thought)}: expected a string")
            thoughts.append(thought)
        elif kind == "redacted_thinking":
            warn(warnings, place, "only the service that encrypted redacted_thinking can read it")
        elif kind == "tool_use":
            calls.append(_call(block, place))
            names[block["id"]] = block["name"]
    message: JsonObject = {"role": "assistant"}
    if texts:
        message["content"] = _content(texts)
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    elif not texts:
        message["content"] = ""
    return message


def _call(block: JsonObject, place: str) -> JsonObject:
    """Return a tool_use block as a tool call of a chat.  ApiError (400) if its id, name or input is malformed."""
    for key in ("id", "name"):
        if not isinstance(block.get(key), str) or not block[key]:
            raise wrong(f"{place}.{key}", f"={shown(block.get(key))}: expected a non-empty string")
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong(f"{place}.input", f"={shown(arguments)}: expected an object")
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _check_continued(turn: Turn, message: JsonObject) -> None:
    """Raise ApiError (400) for a last turn of the assistant that an answer cannot continue."""
    if "tool_calls" in message:
        expected = "a message of role user with a tool_result block for each tool_use block"
        raise wrong(turn.place, f": the last message has tool_use blocks; expected {expected} after it")
    if not message.get("content"):
        raise wrong(turn.place, ": the last message is continued, but it has no text; end it with a text block")
