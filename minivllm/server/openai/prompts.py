"""What a request may ask of its prompt, as vLLM's server has it: fewer tokens of it, special tokens round it, and an
answer that goes on with the last message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.runtime.text.messages import text_of
from minivllm.server.errors import ApiError

SIDES = (None, "left", "right")


def truncation(body: Any, asked: int | None, limit: int) -> int | None:
    """How many tokens of a prompt are kept; None: all.  ``asked``: tokens of the answer.  ApiError (400)."""
    most, side = body.truncate_prompt_tokens, body.truncation_side
    if side not in SIDES:
        raise ApiError(400, f"truncation_side={str(side)[:40]!r}: want left or right", "truncation_side")
    if most is None:
        return None
    if most == -1:
        return max(limit - (asked or 1), 1)
    if not 1 <= most <= limit:
        want = f"-1 (as many as leave room for the answer) or 1 to {limit}, not {str(most)[:24]}"
        raise ApiError(400, f"truncate_prompt_tokens: want {want}", "truncate_prompt_tokens")
    return int(most)


def truncated(ids: Sequence[int], most: int | None, side: str | None) -> list[int]:
    """The last ``most`` ids, or the first with ``side="right"``: the side is the one that is cut, as vLLM names it."""
    if most is None or most >= len(ids):
        return list(ids)
    return list(ids[:most] if side == "right" else ids[-most:])


def begins_answer(body: Any) -> bool:
    """Whether the template begins a new message.  ApiError (400) if the last one shall be continued as well."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        what = "continue_final_message beside add_generation_prompt: want one of them"
        raise ApiError(400, what, "continue_final_message")
    return False


def answer_role(messages: Sequence[dict[str, Any]], body: Any) -> str:
    return "assistant" if begins_answer(body) else str(messages[-1].get("role"))


def last_content(messages: Sequence[dict[str, Any]], body: Any) -> str:
    """With ``echo``: the text of the last message, if the answer is of the same role."""
    last = messages[-1]
    return text_of(last.get("content")) if body.echo and last.get("role") == answer_role(messages, body) else ""


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before a text and behind it."""
    plain, whole = tokenizer.encode("a", False), tokenizer.encode("a", True)
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return [], []
