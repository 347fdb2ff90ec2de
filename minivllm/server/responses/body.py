"""Read the body of ``POST /v1/responses``: check its fields and make the body of a chat.

Fields that this protocol does not declare are passed to the chat, so they have the names and rules of its fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minivllm.errors import RequestError, shown, suggest
from minivllm.server.errors import ApiError, printable
from minivllm.server.openai import JsonObject, Warnings, fields
from minivllm.server.openai.bodies import ChatBody
from minivllm.server.openai.field_table import OTHER
from minivllm.server.openai.generate import Service, checked

from .items import ItemConversation
from .tools import ToolSet, read_choice, read_tools

LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
# values of ``include`` about OpenAI's own tools and about images
FOREIGN = (
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
FORMATS = ("text", "json_object", "json_schema")
MOST_UNKNOWN = 8  # largest number of unknown fields that are compared with the known ones
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512
# fields that are passed to the chat under the same name, which the table of fields handles
PASSED = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "truncation", "user", "service_tier",
    "safety_identifier", "prompt_cache_key", "max_tool_calls",
)  # fmt: skip
# advice -> fields of a chat that a response does not have
REFUSED = {
    "send input": ("messages",),
    "send max_output_tokens": ("max_tokens", "max_completion_tokens"),
    "send text.format": ("response_format",),
    "send reasoning.effort": ("reasoning_effort",),
    f'send include: ["{LOGPROBS}"]': ("logprobs",),
    "a response is one new message of the assistant": (
        "n", "best_of", "echo", "continue_final_message", "add_generation_prompt",
    ),
    "use /v1/chat/completions": ("prompt_logprobs", "taps", "routes", "return_token_ids"),
    "this server stores no conversations; send previous_response_id, or the whole input": ("conversation",),
    "this server stores no prompts; send instructions and input": ("prompt",),
}  # fmt: skip
# fields of a chat -> fields of a response, for messages
NAMES = {
    "max_tokens": "max_output_tokens", "response_format.json_schema": "text.format", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort", "prompt": "input", "messages": "input",
}  # fmt: skip
_PLACES = re.compile(
    r"messages\[\d+\](\.tool_calls\[\d+\]\.function)?|\bmax_tokens\b|\bresponse_format(\.json_schema)?\b"
    r"|\breasoning_effort\b|^messages\b"
)


@dataclass
class ParsedRequest:
    """A checked body.

    ``ident`` is the id of the response without its prefix.  ``chat`` is the body of the chat.  ``items`` are the items
    of the body's own input, without references, and ``conversation`` has the messages of the whole conversation."""

    ident: str
    body: Any
    chat: Any
    items: list[JsonObject]
    conversation: ItemConversation
    tools: ToolSet
    include: frozenset[str]
    warnings: Warnings
    turns: tuple[bytes, ...] = ()  # JSON lists of the items of earlier responses

    @property
    def stored(self) -> bool:
        """Return whether the response is stored."""
        return self.body.store is not False

    @property
    def form(self) -> JsonObject:
        """Return the field ``text.format`` of the body, {"type": "text"} by default."""
        return (self.body.text or {}).get("format") or {"type": "text"}

    def renamed(self, text: str) -> str:
        """Return a message or the name of a field with the client's places and fields in place of the chat's."""
        places = self.conversation.places
        return _PLACES.sub(lambda found: _place(found[0], places), text)


def _place(name: str, places: dict[str, str]) -> str:
    """Return the place in the client's body for a place in the chat, such as "messages[3]", that was made from it."""
    return places.get(name) or NAMES.get(name) or places.get(name.partition(".")[0], name)


@contextmanager
def client_names(parsed: ParsedRequest) -> Iterator[None]:
    """Replace the names and places of the chat in errors by the names and places in the client's body."""
    try:
        yield
    except (ApiError, RequestError) as exc:
        param = None if exc.param is None else NAMES.get(exc.param, parsed.renamed(exc.param))
        status, headers = getattr(exc, "status", 400), getattr(exc, "headers", None)
        raise ApiError(status, parsed.renamed(str(exc)), param, headers) from exc


async def read(service: Service, parsed: ParsedRequest, owner: str) -> None:
    """Set the chat of a request whose input has been read.  ApiError (400) for fields out of range."""
    body = parsed.body
    values = {name: getattr(body, name) for name in PASSED if getattr(body, name) is not None}
    values.update(_further(body))
    values["messages"] = parsed.conversation.messages
    values["max_tokens"] = body.max_output_tokens
    if parsed.tools.functions:
        values["tools"] = parsed.tools.functions
    values["tool_choice"] = read_choice(body.tool_choice, parsed.tools)
    values.update(_text(parsed))
    values.update(_reasoning(parsed))
    _check_options(parsed)
    if LOGPROBS in parsed.include or body.top_logprobs:
        values.update(logprobs=True, top_logprobs=body.top_logprobs or 0)
    if body.stream and body.model_extra and body.model_extra.get("include_energy"):
        values["stream_options"] = {"include_usage": True}
    with client_names(parsed):
        parsed.chat = await checked(service, ChatBody, values, owner)


def begin(ident: str, body: Any, items: list[JsonObject]) -> ParsedRequest:
    """Return the request of a body with its tools, before its conversation and its chat are read."""
    _refuse(body)
    tools = read_tools(body.tools)
    conversation = ItemConversation(body.instructions)
    return ParsedRequest(ident, body, None, items, conversation, tools, _include(body.include), [*tools.warnings])


def _refuse(body: Any) -> None:
    """Raise ApiError (400) for fields that are not served."""
    further = body.model_extra or {}
    for advice, names in REFUSED.items():
        for name in names:
            value = getattr(body, name, None) if name in type(body).model_fields else further.get(name)
            if value is not None and value is not False and not (name in ("n", "best_of") and value == 1):
                raise ApiError(400, f"{name} is not supported: {advice}", name)


def _further(body: Any) -> JsonObject:
    """Return the fields that the body does not declare, without neutral values of refused fields.

    ApiError (400) for a misspelled field of this protocol."""
    for name in list(body.model_extra or ())[:MOST_UNKNOWN]:
        is_handled = name in OTHER or name in ChatBody.model_fields
        near = "" if is_handled else suggest(name[:64], type(body).model_fields, 0.8)
        if near:
            raise ApiError(400, f"unknown field {name[:64]!r}.{near}", name[:64])
    refused = {name for names in REFUSED.values() for name in names}
    return {name: value for name, value in (body.model_extra or {}).items() if name not in refused}


def _include(value: Any) -> frozenset[str]:
    """Return the values of ``include``.  ApiError (400) for unknown ones."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for part in listed:
        if not isinstance(part, str) or part not in (LOGPROBS, SEALED, *FOREIGN):
            raise ApiError(400, f"include={shown(part)}: expected {LOGPROBS} or {SEALED}", "include")
    return frozenset(listed)


def _object(body: Any, name: str, keys: tuple[str, ...]) -> JsonObject:
    """Return a field that is an object of ``keys``.  ApiError (400) for anything else."""
    value = getattr(body, name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ApiError(400, f"{name}: expected an object", name)
    for key in value:
        if key not in keys and value[key] is not None:
            place = f"{name}.{printable(str(key), 64)}"
            raise ApiError(400, f"{place}: unknown field; expected {', '.join(keys)}", place)
    return value


def _text(parsed: ParsedRequest) -> JsonObject:
    """Return the fields of the chat for ``text``: the format of the answer.  ApiError (400) for an unknown format."""
    text = _object(parsed.body, "text", ("format", "verbosity"))
    if text.get("verbosity") not in (None, "medium"):
        fields.warn(parsed.warnings, "text.verbosity", "no chat template reads it")
    form = parsed.form
    kind = form.get("type") if isinstance(form, dict) else form
    if kind not in FORMATS:
        raise ApiError(400, f"text.format.type={shown(kind)}: expected one of {', '.join(FORMATS)}", "text.format")
    return {} if kind == "text" else {"response_format": form}


def _reasoning(parsed: ParsedRequest) -> JsonObject:
    """Return the fields of the chat for ``reasoning``: its effort.  Other keys add a warning."""
    keys = ("effort", "summary", "generate_summary", "context", "mode")
    reasoning = _object(parsed.body, "reasoning", keys)
    for key in keys[1:]:
        if reasoning.get(key) is not None:
            reason = "this server makes no summary; the reasoning itself is in the content of its item"
            reason = reason if "summary" in key else "it is a feature of another service"
            fields.warn(parsed.warnings, f"reasoning.{key}", reason)
    effort = reasoning.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _check_options(parsed: ParsedRequest) -> None:
    """Check the remaining fields.  ApiError (400) names the wrong one."""
    body = parsed.body
    metadata = _checked_metadata(body.metadata)
    assert metadata is None or isinstance(metadata, dict)
    options = _object(body, "stream_options", ("include_obfuscation", "include_usage"))
    if options and not body.stream:
        raise ApiError(400, "stream_options: expected only with stream=true", "stream_options")
    for key, value in options.items():
        if value not in (None, False):
            fields.warn(parsed.warnings, f"stream_options.{key}", "the last event always has the usage")
    for name in sorted(parsed.include.intersection(FOREIGN)):
        fields.warn(parsed.warnings, "include", f"no answer of this server has {name}")
    if body.truncation not in (None, "auto", "disabled"):
        raise ApiError(400, f"truncation={shown(body.truncation)}: expected auto or disabled", "truncation")


def _checked_metadata(metadata: Any) -> Any:
    """Return the metadata unchanged.  ApiError (400) unless it is a small object of strings."""
    if metadata is None:
        return None
    expected = f"metadata: expected an object of at most {MOST_METADATA} keys of {LONGEST_KEY} characters"
    if not isinstance(metadata, dict) or len(metadata) > MOST_METADATA:
        raise ApiError(400, expected, "metadata")
    for key, value in metadata.items():
        if len(key) > LONGEST_KEY or not isinstance(value, str) or len(value) > LONGEST_VALUE:
            text = f"{expected}, with strings of {LONGEST_VALUE} characters as values"
            raise ApiError(400, text, "metadata")
    return metadata
