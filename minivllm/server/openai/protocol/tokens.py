"""``POST /tokenize`` and ``POST /detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from .chat import DOCUMENTS
from .common import Body, Table


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = None
    add_special_tokens: bool | None = Field(None, description="default true for a prompt, false for messages")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="of messages, as in a chat")
    return_token_strs: bool | None = None
    tools: Any = None
    documents: Annotated[Any, WithJsonSchema(DOCUMENTS)] = None
    chat_template: str | None = Field(None, description="of messages, as in a chat")
    chat_template_kwargs: Table = None
    split_special_tokens: bool | None = Field(None, description="of messages, as in a chat")


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]
