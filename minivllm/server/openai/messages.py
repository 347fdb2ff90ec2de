"""Messages as clients send them, in the forms that chat templates know: text, or a list of parts of text."""

from __future__ import annotations

from typing import Any

from minivllm.server.errors import ApiError

# type of a part -> the field that has its text; the second and third are those of OpenAI's Responses
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
SILENT = ("assistant", "tool", "function")  # roles whose messages may have no content


def plain(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The message with its content as text parts or text; a refusal is text.  ApiError (400) for other parts."""
    content, role = message.get("content"), message["role"]
    if isinstance(content, list):
        return {**message, "content": [_text(part, number) for part in content]}
    if content is not None or role not in SILENT:
        return message
    call = message.get("function_call")
    if isinstance(call, dict) and not message.get("tool_calls"):  # the form that tool_calls have replaced
        calls = [{"id": "call_0", "type": "function", "function": call}]
        message = {key: value for key, value in message.items() if key != "function_call"} | {"tool_calls": calls}
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        return {**message, "content": refusal}
    return message if message.get("tool_calls") else {**message, "content": ""}


def _text(part: Any, number: int) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, dict) else None
    name = TEXTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        what = f"messages[{number}].content: parts of type {str(kind)[:40]!r} are not supported"
        raise ApiError(400, f"{what}; want text", "messages")
    text = part.get(name)
    if not isinstance(text, str):
        raise ApiError(400, f"messages[{number}].content: a part of type {kind} needs {name}, a string", "messages")
    return part if kind == "text" and "type" in part else {"type": "text", "text": text}
