"""The text of an answer as a message: what is said, and calls of tools, whole or piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from . import tools
from .calls import Begun, Distinct, Ended, Named, Said, ToolCall, Written

HELD: dict[str, Any] = {"none": lambda: None, "required": Distinct}


class Reader:
    """The text of one choice as deltas of a message, and the message that they add up to.

    A call that is cut by the length of the answer is in the deltas as far as it came, and not in the message: neither
    has a part of one as text."""

    def __init__(self, asked: tools.Tools, parser: Any) -> None:
        self._choice, self._only, self._parallel = asked.choice, asked.only, asked.parallel
        makers = {**HELD, "auto": parser, "named": lambda: Named(asked.function)}
        self._parser = makers[asked.choice]()
        self._said: list[str] = []
        self._calls: list[ToolCall | Begun] = []  # in order
        self._arguments: list[str] = []  # of the call that was begun last, as far as it came
        self._whole: dict[int, str] = {}  # place in ``_calls`` -> all its arguments

    @property
    def plain(self) -> bool:
        """Whether any text is content of the message as it comes."""
        return self._parser is None

    def deltas(self, text: str, reason: str | None) -> dict[str, Any]:
        """What is new; {} if nothing is.  ``reason``: why the text ends, with its last piece."""
        said: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        for one in self._found(text, reason):
            if self._whole and not self._parallel:  # one call is the whole answer
                break
            if isinstance(one, Said):
                said.append(one.text)
            elif isinstance(one, ToolCall) and self._only is not None and one.name not in self._only:
                # a function that the model was not shown: no call, so it is text
                said.append(json.dumps({"name": one.name, "arguments": one.arguments}, ensure_ascii=False))
            elif isinstance(one, (ToolCall, Begun)):
                number = len(self._calls)
                self._calls.append(one)
                self._arguments = []
                if isinstance(one, ToolCall):
                    self._whole[number] = one.arguments
                calls[number] = {"index": number, **_call(one, self._whole.get(number, ""))}
            elif isinstance(one, Written):
                number = len(self._calls) - 1
                self._arguments.append(one.text)
                delta = calls.setdefault(number, {"index": number, "function": {"arguments": ""}})
                delta["function"]["arguments"] += one.text
            else:
                assert isinstance(one, Ended)
                self._whole[len(self._calls) - 1] = "".join(self._arguments)
        delta = {"content": "".join(said)} if said else {}
        self._said += said
        return {**delta, "tool_calls": list(calls.values())} if calls else delta

    def _found(self, text: str, reason: str | None) -> list[Any]:
        if self._parser is None:
            return [Said(text)] if text else []
        cut = getattr(self._parser, "cut", None) if reason == "length" else None
        found = list(self._parser.feed(text, reason is not None and cut is None))
        return found if cut is None else [*found, *cut()]

    def message(self, role: str = "assistant") -> dict[str, Any]:
        content = "".join(self._said)
        message: dict[str, Any] = {"role": role, "content": content, "refusal": None}
        if self._whole:
            message["tool_calls"] = [_call(self._calls[number], text) for number, text in self._whole.items()]
            message["content"] = content.strip() or None
        return message

    def reason(self, reason: str | None) -> str | None:
        """A named function ends with "stop", as with OpenAI; calls that the model chose with "tool_calls"."""
        return "tool_calls" if reason == "stop" and self._whole and self._choice != "named" else reason


def end_of_calls(asked: tools.Tools, parser: Any) -> Callable[[int, str], bool] | None:
    """Return what tells when an answer has no more calls to make: at a call that was made before, where calls are
    required, or behind the first one if ``parallel_tool_calls`` is false.  None if that is not to be asked.

    It is called with the number of a branch and the text that is new."""
    if asked.choice != "required" and (asked.choice != "auto" or asked.parallel):
        return None
    parsers: dict[int, Any] = {}

    def ended(sample: int, text: str) -> bool:
        if sample not in parsers:
            parsers[sample] = Distinct() if asked.choice == "required" else parser()
        found = parsers[sample].feed(text, False)
        if asked.choice == "required":
            return bool(parsers[sample].repeated)
        return any(isinstance(one, ToolCall) and (asked.only is None or one.name in asked.only) for one in found)

    return ended


def _call(call: ToolCall | Begun, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
