"""Convert bodies of Ollama's API to the fields of this server's chats and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.server.errors import ApiError
from minivllm.server.openai import JsonObject
from minivllm.server.openai.reasoning import OTHER_EFFORTS

from .names import served_name

if TYPE_CHECKING:
    from minivllm.server.openai.generate import Service

ENDLESS = {"num_predict": -1}  # the option that requests the rest of the context
SENT = {"response_format": "format"}


def is_load(body: Any) -> bool:
    """Return whether a request only loads the model: a chat without messages, or an empty prompt."""
    given = body.messages if hasattr(body, "messages") else body.prompt
    return given is None or (isinstance(given, (str, list)) and not given)


def chat_values(service: Service, body: Any) -> JsonObject:
    """Return the fields of a chat of this server for the body of ``/api/chat``."""
    values = _shared_values(service, body)
    values["messages"] = _messages(body.messages, service.images.reads)
    values["tools"] = body.tools
    values.update(_scores(body))
    return values


def prompt_values(service: Service, body: Any) -> JsonObject:
    """Return the fields of a chat of this server for the body of ``/api/generate``: the prompt as a user's message."""
    values = _shared_values(service, body)
    messages = [] if not body.system else [{"role": "system", "content": body.system}]
    content = body.prompt
    if service.images.reads and isinstance(values.get("images"), list):
        content = with_images(content, values.pop("images"))
    values["messages"] = [*messages, {"role": "user", "content": content}]
    values.update(_scores(body))
    return values


def raw_values(service: Service, body: Any) -> JsonObject:
    """Return the fields of a completion of this server for the body of ``/api/generate`` with ``raw``.  ApiError (400)
    for fields that this mode does not support.

    The answer may use the rest of the context, as in Ollama, unless the request limits it."""
    for name in ("system", "template", "context"):
        if getattr(body, name, None):
            raise ApiError(400, f"raw mode does not support {name}: put it into the prompt", name)
    values = _shared_values(service, body)
    values["prompt"] = body.prompt
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ApiError(400, "top_logprobs: expected only with logprobs=true", "top_logprobs")
    options = values.get("options") or {}
    limits = ("num_predict", "n_predict", "max_tokens", "max_new_tokens")
    if all(place.get(name) is None for name in limits for place in (options, values)):
        values["options"] = {**options, **ENDLESS}
    return values


def sent_names(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a map from fields of this server to the names under which a client of Ollama sent them."""
    options = values.get("options") or {}
    return {**SENT, **{str(name)[:64]: f"options.{str(name)[:64]}" for name in options}}


def _shared_values(service: Service, body: Any) -> JsonObject:
    """Return the fields of a chat or completion that do not depend on the route.

    Fields that the route does not declare are kept: the table of fields maps, refuses or ignores them."""
    values: JsonObject = dict(body.model_extra or {})
    values["model"] = served_name(service, body.model or body.name)
    values["stream"] = body.stream is not False
    if body.think is not None:
        values["think"] = OTHER_EFFORTS.get(body.think, body.think) if isinstance(body.think, str) else body.think
    if body.keep_alive is not None:
        values["keep_alive"] = body.keep_alive
    options = body.options
    if options is not None:
        if not isinstance(options, dict):
            raise ApiError(400, "options: expected an object of names and values", "options")
        values["options"] = {name: value for name, value in options.items() if (name, value) != ("seed", -1)}
    form = _form(body.format)
    if form is not None:
        values["response_format"] = form
    if values.get("stream_options") is not None:
        raise ApiError(400, "stream_options is not supported: every stream of Ollama's API ends with its figures")
    return values


def _form(value: Any) -> JsonObject | None:
    """Return the ``response_format`` for a ``format``: "json" or a JSON schema; None if it is "" or missing.  ApiError
    (400) for anything else."""
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise ApiError(400, 'format: expected "json" or a JSON schema', "format")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


def _scores(body: Any) -> JsonObject:
    """Return the fields of log-probabilities of a chat."""
    if not body.logprobs and not body.top_logprobs:
        return {}
    return {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}


def _messages(messages: Any, reads_images: bool) -> Any:
    """Return a conversation with the keys of OpenAI's API.  The chat checks its values."""
    if not isinstance(messages, list):
        return messages
    return [_message(message, reads_images) if isinstance(message, dict) else message for message in messages]


def _message(message: JsonObject, reads_images: bool) -> JsonObject:
    """Return a message with the keys of OpenAI's API: ``name`` for ``tool_name``, and calls without an index."""
    found = {key: value for key, value in message.items() if key != "tool_name"}
    if message.get("tool_name") is not None:
        found.setdefault("name", message["tool_name"])
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_call(call) for call in calls]
    if reads_images and isinstance(message.get("images"), list):
        found["content"] = with_images(message.get("content"), found.pop("images"))
    return found


def with_images(content: Any, images: Sequence[Any]) -> Any:
    """Return the content of a message with its images, which are base64 texts, before its text."""
    parts: list[JsonObject] = [{"type": "image", "source": {"type": "base64", "data": image}} for image in images]
    return [*parts, {"type": "text", "text": content}] if parts else content


def _call(call: Any) -> Any:
    """Return a call of a message without the keys that only number the call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    kept = {key: value for key, value in function.items() if key != "index"}
    return {**call, "function": kept}
