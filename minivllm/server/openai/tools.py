"""Tools of a request: their schemas, the choice between them, and the parsers that find calls in generated text.

``tool_choice``   none      the chat template does not show the tools to the model
                  auto      the model may call; a parser finds calls in the text while it is generated
                  required  a grammar allows nothing but calls
                  named     a grammar allows nothing but one call of the function

``allowed_tools`` is auto or required with some of the tools.  The chat template does not show the others.

A plug-in of the kind ``parser`` finds calls in text.  ``register`` adds a further parser, a class with ``feed(text,
final) -> [Said | Thought | ToolCall, ...]``, under a name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.core.json_schema.closing import closed, schemas
from minivllm.core.json_schema.depth import MOST_BYTES, MOST_DEPTH, value_depth
from minivllm.core.json_schema.references import pointer
from minivllm.errors import suggest
from minivllm.runtime.replies import NAME
from minivllm.runtime.replies.grammar import ANSWER, AUTO, FORCED, Function, Spelling, reply_grammar
from minivllm.runtime.replies.grammar_rules import Inexpressible
from minivllm.server.errors import ApiError, printable

from . import JsonObject

MOST = 128  # largest number of tools of a request
COMPACT = {"disable_any_whitespace": True}  # if whitespace is allowed, a small model may generate nothing else


PARSERS: dict[str, Any] = {}  # parsers that ``register`` has added


def register(name: str, make: Any) -> None:
    """Add a class of parsers under a name for ``[server] tool_parser``.

    A parser has ``feed(text, final) -> [Said | Thought | ToolCall, ...]``.  It returns the parts that are certain after
    new text; ``final`` returns all of the rest.  A parser may also have ``cut()``, with the same result.  It returns
    the rest of an answer that the length limit has cut, without an incomplete call at its end.  Without ``cut`` the
    server calls ``feed("", True)``.

    The class may have a static method ``tags() -> Sequence[str]``.  Then the server makes a parser with the argument
    ``marks``, {tag: character}.  It has the tags that are one token of the model's tokenizer.  In the text such a token
    is this character, a lone surrogate; text that only spells the tag stays text."""
    PARSERS[name] = make


@dataclass(frozen=True)
class Tools:
    """The tools of a request and the choice: ``none``, ``auto``, ``required`` or ``named`` (only ``function``)."""

    listed: list[JsonObject]
    choice: str
    function: str = ""
    parallel: bool = True
    only: frozenset[str] | None = None  # the functions that the model may call; None means all

    def allows(self, name: str) -> bool:
        """Return whether the model may call a function."""
        return self.only is None or name in self.only

    @property
    def shown(self) -> list[JsonObject] | None:
        """Return the tools that the chat template shows to the model, or None."""
        return self.listed if self.listed and self.choice != "none" else None

    @property
    def strict(self) -> bool:
        """Return whether calls that the model may choose to write must fit the schema of a strict function."""
        return self.choice == "auto" and any(tool["function"].get("strict") for tool in self.listed)

    def form(self, spelling: Spelling | None = None) -> JsonObject | None:
        """Return the structured outputs that constrain the calls of an answer, or None without a constraint.

        ``spelling`` is the format in which the model writes calls, or None if no grammar can be written for it.  Forced
        calls that the format cannot express are constrained to a list in JSON.  With ``auto``, calls are constrained
        only if a function is strict; ApiError (400) if the format cannot express them.
        """
        if self.choice not in ("named", "required"):
            return self._reply(spelling, AUTO) if self.strict and spelling is not None else None
        try:
            return self._json_list() if spelling is None else self._reply(spelling, FORCED)
        except Inexpressible:
            return self._json_list()

    def beside(self, answer: Any, spelling: Spelling) -> JsonObject | None:
        """Return the structured outputs for an answer that is either calls or a JSON value of the schema ``answer``.

        None if the format of calls (``spelling``) cannot express both."""
        try:
            return self._reply(spelling, ANSWER, answer)
        except Inexpressible:
            return None

    def _reply(self, spelling: Spelling, mode: str, answer: Any = None) -> JsonObject:
        """Return the structured outputs that constrain calls in the model's own format, as a grammar.

        ``mode`` is AUTO, FORCED or ANSWER; in the latter, the answer may also be JSON of the schema ``answer``.

        ApiError (400) in the mode AUTO, else Inexpressible, if a strict schema cannot be expressed in the format of the
        model's calls."""
        named = self.choice == "named"
        listed = [self._of(self.function)] if named else [tool["function"] for tool in self.listed]
        _measure(listed)
        functions = []
        for function in listed:
            constrained = mode == FORCED or bool(function.get("strict"))
            schema = _parameters(function) if constrained else {}
            functions.append(Function(function["name"], schema, constrained))
        parallel = self.parallel and not named
        try:
            return {"reply": reply_grammar(spelling, functions, mode, parallel, answer)}
        except Inexpressible as e:
            if mode != AUTO:
                raise
            text = f"tools: strict: the format of this model's calls cannot express {e}"
            raise ApiError(400, f"{text}; change the schema, or leave strict out", "tools") from None

    def _json_list(self) -> JsonObject:
        """Return the JSON schema of forced calls as structured outputs: a list of calls, or the arguments of a named
        function."""
        if self.choice == "named":
            _measure([self._of(self.function)])
            return {"json": _parameters(self._of(self.function)), **COMPACT}
        _measure([tool["function"] for tool in self.listed])
        definitions: JsonObject = {}
        calls: list[JsonObject] = []
        for number, tool in enumerate(self.listed):
            function = tool["function"]
            definitions[f"t{number}"] = _moved(_parameters(function), f"#/$defs/t{number}")
            members = {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/t{number}"}}
            calls.append(
                {"type": "object", "required": [*members], "additionalProperties": False, "properties": members}
            )
        schema: JsonObject = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
        if not self.parallel:
            schema["maxItems"] = 1
        return {"json": schema, **COMPACT}

    def _of(self, name: str) -> JsonObject:
        """Return the declared function that has a name."""
        return next(tool["function"] for tool in self.listed if tool["function"]["name"] == name)


OF_FUNCTION = ("name", "description", "parameters", "strict")
# type of a ``tool_choice`` -> keys of its object that the server reads
OF_CHOICE = {
    "function": ("type", "function", "name"),
    "tool": ("type", "name", "disable_parallel_tool_use"),
    "allowed_tools": ("type", "allowed_tools", "mode", "tools"),
}


def _check_keys(values: Any, at: str, keys: Sequence[str]) -> None:
    """Raise ApiError (400) for a key of an object whose value is not null and that the server does not read."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if key not in keys and value is not None:
            near = suggest(str(key), keys)
            text = f"{at}.{str(key)[:64]}: unknown field; expected {', '.join(keys)}.{near}"
            raise ApiError(400, text, "tool_choice")


def _spelled(choice: Any) -> Any:
    """Return a choice in OpenAI's spelling.

    Other APIs write ``any`` in place of ``required``, or an object with the word as its ``type``."""
    if isinstance(choice, dict) and isinstance(choice.get("type"), str):
        keys = OF_CHOICE.get(choice["type"], ("type", "disable_parallel_tool_use"))
        _check_keys(choice, "tool_choice", keys)
        _check_keys(choice.get("function"), "tool_choice.function", ("name",))
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "any":
        return "required"
    if kind == "tool" and isinstance(choice, dict):
        return {"type": "function", "name": choice.get("name")}
    return kind if kind in ("none", "auto", "required") else choice


def _quoted(value: Any) -> str:
    """Return a value as JSON for a message."""
    return printable(json.dumps(value), 80)


def read_tools(tools: Any, choice: Any, parallel: bool | None) -> Tools:
    """Return the tools of a request with the choice.

    ApiError (400) for malformed tools or a malformed choice, and for a choice that does not fit the tools."""
    tools = tools or []
    if not isinstance(tools, list) or len(tools) > MOST:
        raise ApiError(400, f"tools: expected a list of at most {MOST} functions", "tools")
    for number, tool in enumerate(tools):
        _check_tool(f"tools[{number}]", tool)
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        text = f"tools: two functions have the name {printable(twice, 64)!r}; rename one of them"
        raise ApiError(400, text, "tools")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        parallel = False
    several = parallel is not False
    choice = _spelled(choice)
    if choice is None:
        return Tools(tools, "auto" if tools else "none", parallel=several)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        mode, allowed = _allowed(choice, names)
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        return Tools(tools, mode, parallel=several, only=frozenset(allowed))
    if kind == "function":
        function = choice.get("function", choice)  # the Responses API puts the name next to the type
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise ApiError(400, f"tool_choice: {_quoted(name)} is not the name of a function in tools", "tool_choice")
        return Tools(tools, "named", str(name), several)
    if choice not in ("none", "auto", "required"):
        expected = 'none, auto, required, {"type": "function", "function": {"name": ...}} or allowed_tools'
        raise ApiError(400, f"tool_choice={_quoted(choice)}: expected {expected}", "tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice=required: expected tools to choose from", "tool_choice")
    return Tools(tools, str(choice) if tools else "none", parallel=several)


def _check_tool(at: str, tool: Any) -> None:
    """Raise ApiError (400) for a malformed tool.  ``at`` is its place in the body."""
    function: Any = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    named = isinstance(name, str) and NAME.fullmatch(name)
    if not named or not isinstance(function.get("parameters"), (dict, type(None))):
        expected = '{"type": "function", "function": {"name": ..., "parameters": <JSON schema>}}'
        raise ApiError(400, f"{at}: expected {expected}", "tools")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise ApiError(400, f"{at}.function.strict: expected true or false", "tools")
    for key in function.keys() - set(OF_FUNCTION):  # the chat template prints further keys
        near = suggest(str(key), OF_FUNCTION, 0.8)
        if near:
            raise ApiError(400, f"{at}.function.{str(key)[:64]}: unknown field.{near}", "tools")


def _allowed(choice: JsonObject, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the mode and the names of a choice of type ``allowed_tools``.

    The shape is {"type": "allowed_tools", "allowed_tools": {"mode", "tools": [{"type", "function": {"name"}}]}}.  As in
    OpenAI's Responses API, the outer object may have the members of the inner one, and a tool those of its function.
    ApiError (400) for another mode, or for an unknown function."""
    inner = choice.get("allowed_tools", choice)
    members = inner if isinstance(inner, dict) else {}
    mode, listed = members.get("mode"), members.get("tools")
    if mode not in ("auto", "required"):
        raise ApiError(400, "tool_choice.allowed_tools.mode: expected auto or required", "tool_choice")
    if not isinstance(listed, list) or not listed or len(listed) > MOST:
        text = f"tool_choice.allowed_tools.tools: expected a list of 1 to {MOST} functions"
        raise ApiError(400, text, "tool_choice")
    found = []
    for number, tool in enumerate(listed):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            text = f"tool_choice.allowed_tools.tools[{number}] does not have the name of a function in tools"
            raise ApiError(400, text, "tool_choice")
        found.append(name)
    return mode, found


def _parameters(function: Mapping[str, Any]) -> JsonObject:
    """Return the schema of the arguments of a function: an object.

    Undeclared properties are forbidden unless ``strict`` is false or the schema allows them.  ApiError (400) for a
    schema that cannot be closed."""
    schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" in schema and "type" not in schema:
        schema = {"type": "object", **schema}
    try:
        return schema if function.get("strict") is False else closed(schema)
    except ValueError as e:
        raise ApiError(400, f"tools: {e}", "tools") from None


def _measure(functions: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError (400) for schemas that are too large or too deep for a grammar, before they are processed."""
    parameters = [function.get("parameters") for function in functions]
    if max(map(value_depth, parameters)) > MOST_DEPTH:
        raise ApiError(
            400, (f"tools: a schema is too large, or nested deeper than {MOST_DEPTH} levels; simplify it"), "tools"
        )
    size = len(json.dumps(parameters, ensure_ascii=False).encode(errors="surrogatepass"))
    if size > MOST_BYTES:
        raise ApiError(400, f"tools: schemas of {size} bytes; expected at most {MOST_BYTES} together", "tools")


def _moved(schema: JsonObject, place: str) -> JsonObject:
    """Return a copy of a schema as the definition at a place of a larger schema, with its own references adjusted."""
    moved = copy.deepcopy(schema)
    for node in schemas(moved):
        path = pointer(schema, node.get("$ref"))
        if path is not None:
            node["$ref"] = place + path
    return {key: value for key, value in moved.items() if key not in ("$id", "$schema")}
