"""Convert the tools of a Responses body to the functions of a chat, and the calls of an answer back.

A ``custom`` tool takes free text.  The model sees it as a function with one argument, ``input``.  The functions of a
``namespace`` get names with the namespace before them.  Tools that OpenAI's servers run themselves are not served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.server.errors import ApiError, printable, wrong
from minivllm.server.openai import JsonObject, Warnings, fields
from minivllm.server.openai.calls import NAME, json_object
from minivllm.server.openai.tools import MOST

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
# tools that clients send by default although they work without them; they cause a warning
OPTIONAL = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "tool_search")
SERVED = f"{FUNCTION}, {CUSTOM} or {NAMESPACE}"
INPUT = "input"  # name of the argument of a custom tool


@dataclass(frozen=True)
class ClientTool:
    """A tool as the client names it."""

    kind: str
    name: str
    namespace: str | None = None


@dataclass
class ToolSet:
    """The tools of a request.

    ``functions`` are tools of a chat.  ``tools`` maps their names to the client's tools."""

    functions: list[JsonObject] = field(default_factory=list)
    tools: dict[str, ClientTool] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)  # types of tools that are left out
    warnings: Warnings = field(default_factory=list)

    def add(self, kind: str, tool: Mapping[str, Any], at: str, namespace: str | None = None) -> None:
        """Add a function or a custom tool.  ApiError (400) if it is malformed; ``at`` is its place."""
        name = _checked_name(tool, at)
        parameters = tool.get("parameters")
        description = tool.get("description")
        if not isinstance(description, (str, type(None))):
            raise wrong(f"{at}.description", ": expected a string")
        strict = tool.get("strict")
        if not isinstance(strict, (bool, type(None))):
            raise wrong(f"{at}.strict", ": expected true or false")
        if kind == CUSTOM:
            parameters, description = _free_text(tool, description, at)
            strict = True
            if tool.get("format"):
                fields.warn(self.warnings, f"{at}.format", "the model sees the format, but it is not enforced")
        elif not isinstance(parameters, (dict, type(None))):
            raise wrong(f"{at}.parameters", ": expected a JSON schema")
        shown = chat_name(name, namespace)
        if not NAME.fullmatch(shown):
            raise wrong(f"{at}.name", f": expected at most 64 characters with the namespace, not {len(shown)}")
        if shown in self.tools:
            raise wrong(f"{at}.name", f"={name!r}: two tools have the same name")
        self.tools[shown] = ClientTool(kind, name, namespace)
        function = {"name": shown, "description": description, "parameters": parameters, "strict": strict}
        function = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": function})

    def skip(self, kind: str, at: str) -> None:
        """Leave out a tool that only OpenAI's servers run, with a warning."""
        self.skipped.add(kind)
        fields.warn(self.warnings, at, f"this server runs no {kind}, so the model does not see it")

    def client_tool(self, name: str) -> ClientTool:
        """Return the client's tool for the name of a called function."""
        return self.tools.get(name, ClientTool(FUNCTION, name))


def chat_name(name: str, namespace: Any = None) -> str:
    """Return the name of a function that the model sees for a tool of the client."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _checked_name(tool: Mapping[str, Any], at: str) -> str:
    """Return the name of a tool or namespace.  ApiError (400) if it is malformed."""
    name = tool.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(f"{at}.name", ": expected 1 to 64 letters, digits, _, . or -")
    return name


def _free_text(tool: Mapping[str, Any], description: Any, at: str) -> tuple[JsonObject, str]:
    """Return the parameters and the description of the function that stands for a custom tool.  ApiError (400) for a
    malformed format."""
    given = tool.get("format")
    form = given if isinstance(given, dict) else {}
    kind = form.get("type")
    grammar = kind == "grammar" and isinstance(form.get("definition"), str)
    if given is not None and kind != "text" and not grammar:
        expected = '{"type": "text"} or {"type": "grammar", "syntax": ..., "definition": ...}'
        raise wrong(f"{at}.format", f": expected {expected}")
    text = description or ""
    if grammar:
        text = f"{text}\n\nThe input has this form ({form.get('syntax')}):\n{form['definition']}".strip()
    properties = {INPUT: {"type": "string", "description": "the text for the tool"}}
    return {"type": "object", "properties": properties, "required": [INPUT], "additionalProperties": False}, text


def read_tools(tools: Any) -> ToolSet:
    """Return the tools of a body.  ApiError (400) for malformed tools and for tools that are not served."""
    found = ToolSet()
    if not isinstance(tools, (list, type(None))):
        raise ApiError(400, "tools: expected a list of tools", "tools")
    for number, tool in enumerate(tools or ()):
        at = f"tools[{number}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == NAMESPACE:
            _add_namespace(found, tool, at)
        elif kind in (FUNCTION, CUSTOM):
            found.add(str(kind), tool, at)
        elif kind in OPTIONAL:
            found.skip(str(kind), at)
        else:
            tool_type = printable(str(kind), 40)
            raise wrong(f"{at}.type", f"={tool_type!r}: expected {SERVED}; the client must run its tools itself")
        if len(found.functions) > MOST:
            raise ApiError(400, f"tools: expected at most {MOST} functions", "tools")
    return found


def _add_namespace(found: ToolSet, tool: Mapping[str, Any], at: str) -> None:
    """Add the tools of a namespace.  ApiError (400) if it is malformed."""
    name = _checked_name(tool, at)
    inner = tool.get("tools")
    if not isinstance(inner, list):
        raise wrong(f"{at}.tools", ": expected a list of tools")
    for number, member in enumerate(inner[: MOST + 1]):
        place = f"{at}.tools[{number}]"
        kind = member.get("type") if isinstance(member, dict) else None
        if kind not in (FUNCTION, CUSTOM):
            raise wrong(f"{place}.type", f": expected {FUNCTION} or {CUSTOM}")
        found.add(str(kind), member, place, name)


def read_choice(choice: Any, found: ToolSet) -> Any:
    """Return a tool choice as a chat has it.  ``found`` are the tools of the request.  ApiError (400) for an unknown
    type."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in (FUNCTION, CUSTOM):
        return _named(choice)
    if kind == "allowed_tools":
        listed = choice.get("tools")
        if isinstance(listed, list):
            listed = list(_allowed(listed, found.skipped))
        return {**choice, "tools": listed}
    choice_type = printable(str(kind), 40)
    text = f"tool_choice.type={choice_type!r}: expected {FUNCTION}, {CUSTOM} or allowed_tools"
    raise ApiError(400, text, "tool_choice")


def _named(tool: Mapping[str, Any]) -> JsonObject:
    """Return the ``tool_choice`` of a chat that names the function of a tool."""
    name = tool.get("name")
    shown = chat_name(name, tool.get("namespace")) if isinstance(name, str) else name
    return {"type": "function", "function": {"name": shown}}


def _allowed(listed: Sequence[Any], skipped: set[str]) -> Iterator[Any]:
    """Yield the allowed tools as a chat has them, without the tools that were left out."""
    for tool in listed:
        if not isinstance(tool, dict):
            yield tool
        elif tool.get("type") not in skipped:
            yield _named(tool)


def input_of(arguments: str) -> str:
    """Return the text for a custom tool in the arguments of its function.

    Arguments that are not an object with ``input`` are the text itself."""
    text = (json_object(arguments) or {}).get(INPUT)
    return text if isinstance(text, str) else arguments
