"""Calls of tools: how a model is told of tools, how it is made to call one, and how calls are found in its text.

``tool_choice``   none      the tools are not shown
                  auto      the model may call; a parser finds calls in its text as it comes
                  required  a grammar leaves it nothing but a list of calls
                  named     a grammar leaves it nothing but the arguments of that function

``allowed_tools`` is auto or required with a part of the tools; the others are not shown.

A parser is a class with ``feed(text, final) -> [Said | Call, ...]``; ``PARSERS`` names them, ``register`` adds one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minivllm.core.json_schema.closing import closed, schemas
from minivllm.core.json_schema.depth import MOST_BYTES, MOST_DEPTH, value_depth
from minivllm.core.json_schema.references import pointer
from minivllm.errors import ConfigError, shown, suggest
from minivllm.server.errors import ApiError, printable

from .calls import NAME, Said, ToolCall, begins_call, call_of, calls_of

MOST = 128  # tools of a request
COMPACT = {"disable_any_whitespace": True}  # a small model that may write spaces may write nothing else


class CallParser(Protocol):
    """Finds calls in the text of one answer."""

    def feed(self, text: str, final: bool) -> list[Said | ToolCall]:
        """What new text has settled; with ``final``, all that is left.  Text that is no call is said, not lost.

        A parser may have ``cut() -> [Said | Call, ...]`` beside it: what is left of an answer that ended by its length,
        without the half of a call at its end.  Without it, that is ``feed("", True)``."""


def load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write it."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._left, self._called = "", False

    def feed(self, text: str, final: bool) -> list[Said | ToolCall]:
        self._left += text
        found: list[Said | ToolCall] = []
        while True:
            start = self._left.find(self.OPEN)
            if start < 0:
                keep = 0 if final else _overlap(self._left, self.OPEN)
                self._say(found, self._left[: len(self._left) - keep])
                self._left = self._left[len(self._left) - keep :]
                return found
            end = self._left.find(self.CLOSE, start)
            if end < 0 and not final:
                self._say(found, self._left[:start])
                self._left = self._left[start:]
                return found
            inner = self._left[start + len(self.OPEN) : end if end >= 0 else None]
            after = end + len(self.CLOSE) if end >= 0 else len(self._left)
            call = call_of(inner)
            self._say(found, self._left[:start] if call is not None else self._left[:after])
            if call is not None:
                found.append(call)
                self._called = True
            self._left = self._left[after:]

    def cut(self) -> list[Said | ToolCall]:
        inner = self._left.removeprefix(self.OPEN)
        if len(inner) < len(self._left) and inner.lstrip()[:1] in ("", "{"):
            call = call_of(inner[: len(inner) - _overlap(inner, self.CLOSE)])  # only its closing tag is missing
            return [] if call is None else [call]
        return self.feed("", True)

    def _say(self, found: list[Said | ToolCall], text: str) -> None:
        if text and not (self._called and not text.strip()):  # newlines between calls are not for the user
            found.append(Said(text))


class Json:
    """An answer that is nothing but JSON: a call or a list of them."""

    def __init__(self) -> None:
        self._left, self._plain = "", False

    def feed(self, text: str, final: bool) -> list[Said | ToolCall]:
        self._left += text
        begins = self._left.lstrip()[:1]
        self._plain = self._plain or (begins != "" and begins not in "{[")
        if not final and not self._plain:
            return []
        calls, whole = ([], False) if self._plain else calls_of(self._left)
        said, self._left = self._left, ""
        if whole:
            return [*calls]
        return [Said(said)] if said else []

    def cut(self) -> list[Said | ToolCall]:
        calls, _ = ([], False) if self._plain else calls_of(self._left)
        return [*calls] if calls or (self._left and begins_call(self._left)) else self.feed("", True)


PARSERS: dict[str, Callable[[], CallParser]] = {"hermes": Hermes, "json": Json}


def register(name: str, make: Callable[[], CallParser]) -> None:
    """Add a parser under a name for ``[server] tool_parser``."""
    PARSERS[name] = make


def parser_of(name: str) -> Callable[[], CallParser]:
    """ConfigError if there is none of that name."""
    if name not in PARSERS:
        raise ConfigError(f"server.tool_parser={shown(name)}: there are {', '.join(PARSERS)}.{suggest(name, PARSERS)}")
    return PARSERS[name]


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of the text may become the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


@dataclass(frozen=True)
class Tools:
    """The tools of a request and what was chosen: ``none``, ``auto``, ``required`` or ``named`` (``function``)."""

    listed: list[dict[str, Any]]
    choice: str
    function: str = ""
    parallel: bool = True
    only: frozenset[str] | None = None  # names that may be called; None: any

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        return self.listed if self.listed and self.choice != "none" else None

    def form(self) -> dict[str, Any] | None:
        """What the text must fit (structured outputs), or None."""
        if self.choice == "named":
            _measure([self._of(self.function)])
            return {"json": _parameters(self._of(self.function)), **COMPACT}
        if self.choice != "required":
            return None
        _measure([tool["function"] for tool in self.listed])
        definitions: dict[str, Any] = {}
        calls = []
        for number, tool in enumerate(self.listed):
            function = tool["function"]
            definitions[f"t{number}"] = _moved(_parameters(function), f"#/$defs/t{number}")
            calls.append(
                {
                    "type": "object",
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                    "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/t{number}"}},
                }
            )
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
        if not self.parallel:
            schema["maxItems"] = 1
        return {"json": schema, **COMPACT}

    def _of(self, name: str) -> dict[str, Any]:
        return next(tool["function"] for tool in self.listed if tool["function"]["name"] == name)


OF_FUNCTION = ("name", "description", "parameters", "strict")
# the keys that each kind of choice reads
OF_CHOICE = {
    "function": ("type", "function", "name"),
    "tool": ("type", "name", "disable_parallel_tool_use"),
    "allowed_tools": ("type", "allowed_tools", "mode", "tools"),
}


def _check_keys(given: Any, at: str, keys: Sequence[str], param: str) -> None:
    """ApiError (400) for a key that says something and is not read."""
    for key, value in given.items() if isinstance(given, dict) else ():
        if key not in keys and value is not None:
            near = suggest(str(key), keys)
            raise ApiError(400, f"{at}.{str(key)[:64]}: unknown field; want {', '.join(keys)}.{near}", param)


def _spelled(choice: Any) -> Any:
    """Return a choice as OpenAI spells it: others say ``any`` for required, or put the word into an object."""
    if isinstance(choice, dict) and isinstance(choice.get("type"), str):
        keys = OF_CHOICE.get(choice["type"], ("type", "disable_parallel_tool_use"))
        _check_keys(choice, "tool_choice", keys, "tool_choice")
        _check_keys(choice.get("function"), "tool_choice.function", ("name",), "tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "any":
        return "required"
    if kind == "tool" and isinstance(choice, dict):
        return {"type": "function", "name": choice.get("name")}
    return kind if kind in ("none", "auto", "required") else choice


def _quoted(value: Any) -> str:
    return printable(json.dumps(value), 80)


def read_tools(tools: Any, choice: Any, parallel: bool | None) -> Tools:
    """Return the tools of a request and what was chosen.  ApiError (400) for tools or a choice that are malformed or do
    not fit together."""
    tools = tools or []
    if not isinstance(tools, list) or len(tools) > MOST:
        raise ApiError(400, f"tools: want a list of at most {MOST} functions", "tools")
    for number, tool in enumerate(tools):
        function: Any = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        named = isinstance(name, str) and NAME.fullmatch(name)
        if not named or not isinstance(function.get("parameters") or {}, dict):
            want = 'want {"type": "function", "function": {"name": ..., "parameters": <JSON schema>}}'
            raise ApiError(400, f"tools[{number}]: {want}", "tools")
        if not isinstance(function.get("strict"), (bool, type(None))):
            raise ApiError(400, f"tools[{number}].function.strict: expected true or false", "tools")
        for key in function.keys() - set(OF_FUNCTION):  # others are for the template, which prints them
            if near := suggest(str(key), OF_FUNCTION, 0.8):
                raise ApiError(400, f"tools[{number}].function.{str(key)[:64]}: unknown field.{near}", "tools")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two of them have the same name", "tools")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        parallel = False
    choice = _spelled(choice)
    if choice is None:
        return Tools(tools, "auto" if tools else "none", parallel=parallel is not False)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        mode, allowed = _allowed(choice, names)
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        return Tools(tools, mode, parallel=parallel is not False, only=frozenset(allowed))
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)  # Responses have the name beside the type
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise ApiError(400, f"tool_choice: {_quoted(name)} names no function of tools", "tool_choice")
        return Tools(tools, "named", str(name), parallel is not False)
    if choice not in ("none", "auto", "required"):
        want = 'none, auto, required, {"type": "function", "function": {"name": ...}} or allowed_tools'
        raise ApiError(400, f"tool_choice={_quoted(choice)}: want {want}", "tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice=required: want tools to choose from", "tool_choice")
    return Tools(tools, str(choice) if tools else "none", parallel=parallel is not False)


def _allowed(choice: dict[str, Any], names: Sequence[str]) -> tuple[str, list[str]]:
    """(mode, names) of {"type": "allowed_tools", "allowed_tools": {"mode", "tools": [{"type", "function": {"name"}}]}};
    the inner object may also be spread over the outer one, and a function over its tool, as in OpenAI's Responses."""
    inner = choice.get("allowed_tools", choice)
    listed: Any = inner.get("tools") if isinstance(inner, dict) else None
    mode = inner.get("mode") if isinstance(inner, dict) else None
    if mode not in ("auto", "required"):
        raise ApiError(400, "tool_choice.allowed_tools.mode: want auto or required", "tool_choice")
    if not isinstance(listed, list) or not listed or len(listed) > MOST:
        raise ApiError(400, f"tool_choice.allowed_tools.tools: want a list of 1 to {MOST} functions", "tool_choice")
    found = []
    for number, tool in enumerate(listed):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            what = f"tool_choice.allowed_tools.tools[{number}]: names no function of tools"
            raise ApiError(400, what, "tool_choice")
        found.append(name)
    return mode, found


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments must fit: an object, which takes no properties but those declared unless ``strict`` is false
    or the schema says otherwise."""
    schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" in schema and "type" not in schema:
        schema = {"type": "object", **schema}
    try:
        return schema if function.get("strict") is False else closed(schema)
    except ValueError as e:
        raise ApiError(400, f"tools: {e}", "tools") from None


def _measure(functions: Sequence[Mapping[str, Any]]) -> None:
    """ApiError (400) if what is asked of their arguments is more than a grammar is made of: before it is worked on."""
    given = [function.get("parameters") for function in functions]
    if max(map(value_depth, given)) > MOST_DEPTH:
        raise ApiError(400, f"tools: a schema is too large, or nested deeper than {MOST_DEPTH} levels", "tools")
    size = len(json.dumps(given, ensure_ascii=False).encode(errors="surrogatepass"))
    if size > MOST_BYTES:
        raise ApiError(400, f"tools: schemas of {size} bytes: want at most {MOST_BYTES} together", "tools")


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema as a definition at a place of a larger one: its references lead into itself."""
    made = copy.deepcopy(schema)
    for node in schemas(made):
        path = pointer(schema, node.get("$ref"))
        if path is not None:
            node["$ref"] = place + path
    return {key: one for key, one in made.items() if key not in ("$id", "$schema")}
