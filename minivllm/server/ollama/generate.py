"""``POST /api/chat`` and ``POST /api/generate``: an answer to a conversation or to a prompt."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from minivllm.server.openai import JsonObject, tools
from minivllm.server.openai.bodies import ChatBody, CompletionBody, OllamaChatBody, OllamaGenerateBody
from minivllm.server.openai.chat import Chat
from minivllm.server.openai.completions import Completion
from minivllm.server.openai.generate import Service, checked, read_body, respond, warned
from minivllm.server.openai.limits import seconds_of
from minivllm.server.openai.reader import Reader

from . import bodies
from .answers import ChatLines, LineWork, Pieces, TextLines, load_answer
from .names import served_name, tagged


async def chat(request: Request, service: Service) -> Any:
    """Return the answer to a conversation in Ollama's form.  A body without messages only loads the model, which is
    loaded already."""
    body = await read_body(request, service, OllamaChatBody, any_type=True)
    if bodies.is_load(body):
        return _loaded(service, body, {"message": {"role": "assistant", "content": ""}})
    return await _respond(request, service, body, bodies.chat_values(service, body), ChatAnswer)


async def generate(request: Request, service: Service) -> Any:
    """Return the answer to a prompt in Ollama's form, through the chat template unless ``raw`` is true.  A body without
    a prompt only loads the model, which is loaded already."""
    body = await read_body(request, service, OllamaGenerateBody, any_type=True)
    if bodies.is_load(body):
        return _loaded(service, body, {"response": ""})
    if body.raw:
        return await _respond(request, service, body, bodies.raw_values(service, body), RawAnswer)
    return await _respond(request, service, body, bodies.prompt_values(service, body), PromptAnswer)


def _loaded(service: Service, body: Any, members: JsonObject) -> Any:
    """Return the answer to a request that only loads the model."""
    answer = load_answer(_shown(service, body), members)
    served_name(service, body.model or body.name)
    if body.keep_alive is None:
        return JSONResponse(answer)
    reason = "keep_alive has no effect here: the model stays loaded until the server ends"
    warnings = [{"field": "keep_alive", "message": reason}]
    return JSONResponse({**answer, "warnings": warnings}, headers=warned(warnings))


def _shown(service: Service, body: Any) -> str:
    """Return the model's name for the answer."""
    return body.model or body.name or tagged(service.names[0])


async def _respond(request: Request, service: Service, body: Any, values: JsonObject, kind: type[Any]) -> Any:
    """Return the response to a request whose fields were translated to fields of this server."""
    state = request.scope["state"]
    model = CompletionBody if kind is RawAnswer else ChatBody
    inner = await checked(service, model, values, state["owner"], bodies.sent_names(values))
    work = kind(service, inner, state)
    work.shown = _shown(service, body)
    return await respond(request, service, bool(inner.stream), seconds_of(service, inner.timeout_s), work)


class ChatAnswer(LineWork, Chat):
    """A request of ``/api/chat``."""

    stream_type = ChatLines

    def reader(self) -> Reader:
        """Return a new reader for the text of the answer."""
        return self._reader()

    def members(self, found: Pieces) -> JsonObject:
        """Return the message with its text, reasoning and calls."""
        message: JsonObject = {"role": self.role, "content": "".join(found.content)}
        if found.thinking:
            message["thinking"] = "".join(found.thinking)
        if found.calls:
            message["tool_calls"] = found.calls
        return {"message": message}


class PromptAnswer(ChatAnswer):
    """A request of ``/api/generate`` whose prompt is rendered by the chat template."""

    stream_type = TextLines

    def members(self, found: Pieces) -> JsonObject:
        """Return the text of the answer and its reasoning."""
        return _text_members(found)


class RawAnswer(LineWork, Completion):
    """A request of ``/api/generate`` with ``raw``, whose prompt is continued unchanged."""

    stream_type = TextLines

    def reader(self) -> Reader:
        """Return a new reader, for which all text is the answer."""
        return Reader(tools.Tools([], "none"), None)

    def members(self, found: Pieces) -> JsonObject:
        """Return the text of the answer."""
        return _text_members(found)


def _text_members(found: Pieces) -> JsonObject:
    """Return the members of an answer of ``/api/generate`` that have its text."""
    members: JsonObject = {"response": "".join(found.content)}
    if found.thinking:
        members["thinking"] = "".join(found.thinking)
    return members
