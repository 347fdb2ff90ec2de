"""Translate the fields of Anthropic's bodies to the fields of a chat (``ChatBody``).

Fields that this file does not mention are passed on unchanged, so the extensions of a chat are served here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import shown
from minivllm.server.errors import ApiError, wrong
from minivllm.server.openai import JsonObject, Warnings
from minivllm.server.openai.field_table import FORM
from minivllm.server.openai.fields import warn
from minivllm.server.openai.reasoning import BUDGET, OTHER_EFFORTS
from minivllm.server.openai.tools import MOST as MOST_TOOLS

from .conversation import read_conversation

# fields that cannot change the answer of this server -> the reason
NO_EFFECT = {
    "container": "this server runs no code",
    "context_management": "the prompt is the whole conversation",
    "compaction": "the prompt is the whole conversation",
    "diagnostics": "it is a feature of another service",
    "inference_geo": "it is a feature of another service",
    "fallbacks": "the server has one model",
    "fallback_credit_token": "the server has one model",
    "billing_policy": "it is a feature of another service",
    "speed": "it is a feature of another service",
    "user_profile_id": "it is a feature of another service",
}
NEUTRAL = {"speed": "standard"}
# field of a chat whose effect a message cannot show -> alternative
REFUSED = {
    **dict.fromkeys(("n", "best_of"), "a message has one answer"),
    **dict.fromkeys(
        ("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "taps", "routes", "include_energy", "echo"),
        "use /v1/chat/completions",
    ),
    "stream_options": "every stream reports its usage",
    "response_format": "use output_config.format",
    "max_completion_tokens": "use max_tokens",
    "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
    "add_generation_prompt": "a last message of the assistant is continued",
    "continue_final_message": "a last message of the assistant is continued",
}
NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # values that have no effect
THREAD = "this server stores no conversations: send the whole conversation, without thread"
# an error with this code makes the client package repeat the request without a thread
THREAD_CODE = "thread_unsupported_request"
# field of a chat -> field of a message with the same meaning
SAME = {
    "model": "model", "max_tokens": "max_tokens", "stop": "stop_sequences", "stream": "stream",
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "tool_choice": "tool_choice",
    "metadata": "metadata", "service_tier": "service_tier", "mcp_servers": "mcp_servers",
}  # fmt: skip
# type of ``thinking`` -> keys of the object
OF_THINKING = {
    "enabled": ("type", "budget_tokens", "display"),
    "adaptive": ("type", "display"),
    "disabled": ("type", "display"),
}
DISPLAYS = (None, "summarized", "omitted")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
OF_TOOL = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"})
BETA = "the fields of the body say which features a request uses"


@dataclass
class ChatValues:
    """A message body as values of ``ChatBody``.

    ``sent`` maps fields of a chat to the client's fields.  ``shows_thoughts`` is whether thinking blocks have text.
    """

    values: JsonObject = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)
    warnings: Warnings = field(default_factory=list)
    shows_thoughts: bool = True

    def set(self, name: str, value: Any, sent: str) -> None:
        """Set a field of the chat, and record the client's field."""
        self.values[name] = value
        if sent != name:
            self.sent[name] = sent


def translate(body: Any, bounds: bool, images: bool = False) -> ChatValues:
    """Return a body's fields as values of a chat.  ApiError (400) names the first wrong place.

    ``bounds`` means that the server can bound the tokens of the model's reasoning, and ``images`` that it reads
    images."""
    found = ChatValues(dict(body.model_extra or {}))
    _refuse(found.values)
    for name, reason in NO_EFFECT.items():
        value = getattr(body, name, None)
        if value not in (None, NEUTRAL.get(name)):
            warn(found.warnings, name, reason)
    for name, sent in SAME.items():
        value = getattr(body, sent, None)
        if value is not None:
            found.set(name, value, sent)
    conversation = read_conversation(body.messages, body.system, found.warnings, images)
    found.values["messages"] = conversation.messages
    if conversation.continues:
        found.values["continue_final_message"] = True
    if body.tools is not None:
        found.values["tools"] = _tools(body.tools, found.warnings)
    _set_thinking(found, body.thinking, bounds)
    _set_output(found, body)
    return found


def _refuse(values: JsonObject) -> None:
    """Raise ApiError (400) for a field of a chat that a message cannot have.  Values that request nothing are
    removed."""
    if values.pop("thread", None) not in NOTHING:
        raise ApiError(400, f"thread is not supported: {THREAD}", "thread", code=THREAD_CODE)
    for name, instead in REFUSED.items():
        value = values.pop(name, None)
        if value not in NOTHING and not (name in ("n", "best_of") and value == 1):
            raise wrong(name, f" is not supported in a message: {instead}")


def _tools(tools: Any, warnings: Warnings) -> list[JsonObject]:
    """Return the tools of a body as functions of a chat.  ApiError (400) for malformed or too many tools."""
    if not isinstance(tools, list):
        raise wrong("tools", f"={shown(tools)}: expected a list of tools")
    if len(tools) > MOST_TOOLS:
        raise wrong("tools", f": {len(tools)} tools; expected at most {MOST_TOOLS}")
    return [_tool(tool, f"tools[{number}]", warnings) for number, tool in enumerate(tools)]


def _tool(tool: Any, place: str, warnings: Warnings) -> JsonObject:
    """Return a tool as a function of a chat.  ApiError (400) for malformed tools, and for tools that a service runs or
    defines."""
    if not isinstance(tool, dict):
        raise wrong(place, f'={shown(tool)}: expected {{"name": ..., "input_schema": <JSON schema>}}')
    kind = tool.get("type")
    if kind not in (None, "custom"):
        expected = "the server runs no tools and defines none; send a tool with name, description and input_schema"
        raise wrong(f"{place}.type", f"={shown(kind)}: {expected}, which the client runs")
    for key in ("name", "description"):
        value = tool.get(key)
        if not isinstance(value, str) and not (key == "description" and value is None):
            raise wrong(f"{place}.{key}", f"={shown(value)}: expected a string")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise wrong(f"{place}.input_schema", f"={shown(schema)}: expected a JSON schema of an object")
    for key, value in tool.items():
        if key not in OF_TOOL and value not in (None, False, [], ["direct"]):
            warn(warnings, f"{place}.{key[:64]}", "the prompt has the name, the description and the schema of a tool")
    function: JsonObject = {"name": tool["name"], "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _set_thinking(found: ChatValues, thinking: Any, bounds: bool) -> None:
    """Set the switch and the budget of reasoning that ``thinking`` requests.  ApiError (400) if it is malformed."""
    if thinking is None:
        return
    if not isinstance(thinking, dict):
        raise wrong("thinking", f"={shown(thinking)}: expected an object with a type")
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in OF_THINKING:
        raise wrong("thinking.type", f"={shown(kind)}: expected {', '.join(OF_THINKING)}")
    display = thinking.get("display")
    if display not in DISPLAYS:
        raise wrong("thinking.display", f"={shown(display)}: expected summarized or omitted")
    found.shows_thoughts = display != "omitted"
    found.set("enable_thinking", kind != "disabled", "thinking")
    for key, value in thinking.items():
        if key not in OF_THINKING[kind] and value is not None:
            expected = ", ".join(OF_THINKING[kind])
            warn(found.warnings, f"thinking.{key[:64]}", f"thinking of type {kind} has {expected}")
    if kind != "enabled":
        return
    budget = thinking.get("budget_tokens")
    if type(budget) is not int or budget < 1:
        raise wrong("thinking.budget_tokens", f"={shown(budget)}: expected a whole number >= 1")
    if bounds:
        found.set(BUDGET, budget, "thinking.budget_tokens")
    else:
        warn(found.warnings, "thinking.budget_tokens", "the model's vocabulary has no tags around reasoning")


def _set_output(found: ChatValues, body: Any) -> None:
    """Set the effort and the form of the answer from ``output_config`` and the older ``output_format``.  ApiError (400)
    if they are malformed or contradict each other."""
    config = body.output_config
    if config is not None and not isinstance(config, dict):
        raise wrong("output_config", f"={shown(config)}: expected an object with format or effort")
    config = dict(config or {})
    _set_effort(found, config.pop("effort", None))
    wanted = config.pop("format", None)
    for key, value in config.items():
        if value is not None:
            warn(found.warnings, f"output_config.{key[:64]}", "the key is unknown")
    if wanted is not None and body.output_format is not None and wanted != body.output_format:
        raise wrong("output_format", " and output_config.format contradict each other: send only one of them")
    if wanted is not None:
        _set_format(found, wanted, "output_config.format")
    elif body.output_format is not None:
        _set_format(found, body.output_format, "output_format")


def _set_effort(found: ChatValues, effort: Any) -> None:
    """Set the effort of reasoning, unless reasoning is off.  ApiError (400) for an unknown effort."""
    if effort is None:
        return
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise wrong("output_config.effort", f"={shown(effort)}: expected {', '.join(EFFORTS)}")
    if found.values.get("enable_thinking") is False:
        warn(found.warnings, "output_config.effort", "it is the effort of reasoning, and thinking is disabled")
    else:
        found.set("reasoning_effort", OTHER_EFFORTS.get(effort, effort), "output_config.effort")


def _set_format(found: ChatValues, wanted: Any, place: str) -> None:
    """Set the form of the answer to a JSON schema.  ApiError (400) for any other form."""
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind != "json_schema":
        raise wrong(f"{place}.type", f"={shown(kind)}: expected json_schema")
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        raise wrong(f"{place}.schema", f"={shown(schema)}: expected a JSON schema")
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found.set("response_format", format, place)
    found.sent[FORM] = place
