"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from .common import Generation

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT = {
    "anyOf": [
        {"type": "string"}, {"type": "array", "items": {"type": "string"}}, _IDS, {"type": "array", "items": _IDS},
    ]
}  # fmt: skip


class CompletionBody(Generation):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)] = Field(description="text, token ids, or a list of either")
    logprobs: int | None = Field(None, description="of the chosen token and as many of the likeliest, each token")
    echo: bool | None = Field(None, description="the prompt before the answer")
    best_of: int | None = Field(None, description="samples to draw, of which the n likeliest are given")
    suffix: str | None = Field(None, description="not served")
    add_special_tokens: bool | None = Field(None, description="extension: those that the tokenizer puts round a text")
