"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from .common import Generation, Table

_PARTS = {"type": "array", "items": {"type": "object"}}
_MESSAGES = {
    "type": "array", "minItems": 1,
    "items": {
        "type": "object", "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
        },
    },
}  # fmt: skip
_TOOLS = {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
DOCUMENTS = {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}


class ChatBody(Generation):
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)]
    max_completion_tokens: int | None = Field(None, description="as max_tokens; absent: the rest of the context")
    logprobs: bool | None = Field(None, description="of each token")
    top_logprobs: int | None = Field(None, description="and of as many of the likeliest; needs logprobs")
    tools: Annotated[Any, WithJsonSchema(_TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    add_generation_prompt: bool | None = Field(None, description="extension: begin an answer; absent: true")
    continue_final_message: bool | None = Field(None, description="extension: go on with the last message")
    echo: bool | None = Field(None, description="extension: the last message before the answer, if of the same role")
    add_special_tokens: bool | None = Field(
        None, description="extension: those that the tokenizer puts round a text, beside the template's; absent: false"
    )
    chat_template_kwargs: Table = Field(None, description="extension: variables of the chat template")
    documents: Annotated[Any, WithJsonSchema(DOCUMENTS)] = Field(
        None, description="extension: texts for a chat template that has a place for them"
    )
    chat_template: str | None = Field(
        None, description="extension: the name of one of the model's templates; absent: tool_use for tools, or default"
    )
    split_special_tokens: bool | None = Field(
        None, description="extension: what the request spells like a special token stays text; absent: true"
    )
