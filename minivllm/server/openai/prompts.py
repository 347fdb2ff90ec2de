"""Options of a request about its prompt: truncation, special tokens, and continuation of the last message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.runtime.text.messages import text_of
from minivllm.server.errors import ApiError

from . import JsonObject

SIDES = (None, "left", "right")


def truncation(body: Any, answer: int | None, limit: int) -> int | None:
    """Return the number of tokens of a prompt to keep.  None means all.

    ``answer`` is the length of the answer, if it is limited; ``limit`` is the length of the context.  ApiError (400)
    for values out of range."""
    most, side = body.truncate_prompt_tokens, body.truncation_side
    if side not in SIDES:
        raise ApiError(400, f"truncation_side={str(side)[:40]!r}: expected left or right", "truncation_side")
    if most is None:
        return None
    if most == -1:
        return max(limit - (answer or 1), 1)
    if not 1 <= most <= limit:
        expected = f"-1 (as many as leave room for the answer) or 1 to {limit}, not {str(most)[:24]}"
        raise ApiError(400, f"truncate_prompt_tokens: expected {expected}", "truncate_prompt_tokens")
    return int(most)


def truncated(ids: Sequence[int], most: int | None, side: str | None) -> list[int]:
    """Return at most ``most`` ids: the last ones, or the first ones if the cut ``side`` is "right"."""
    if most is None or most >= len(ids):
        return list(ids)
    return list(ids[:most] if side == "right" else ids[-most:])


def begins_answer(body: Any) -> bool:
    """Return whether the chat template begins a new message for the answer.

    ApiError (400) if the request also continues the last message."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt contradict each other: send only one of them"
        raise ApiError(400, text, "continue_final_message")
    return False


def answer_role(messages: Sequence[JsonObject], body: Any) -> str:
    """Return the role of the answer: "assistant", or the role of the last message if the answer continues it."""
    return "assistant" if begins_answer(body) else str(messages[-1].get("role"))


def last_content(messages: Sequence[JsonObject], body: Any) -> str:
    """Return the text of the last message for ``echo``, or "" without ``echo`` or if the answer has another role."""
    last = messages[-1]
    if body.echo and last.get("role") == answer_role(messages, body):
        return text_of(last.get("content"))
    return ""


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before a text and after it."""
    plain, whole = tokenizer.encode("a", False), tokenizer.encode("a", True)
    for start in range(len(whole) - len(plain) + 1):
        end = start + len(plain)
        if whole[start:end] == plain:
            return whole[:start], whole[end:]
    return [], []
