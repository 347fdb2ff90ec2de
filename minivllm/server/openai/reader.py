"""Convert the text of an answer to parts (content, reasoning, tool calls), and parts to a message or to deltas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.runtime.replies import ReplyContext, ReplyParser
from minivllm.runtime.text.marks import NO_MARKS, Marks

from . import JsonObject, tools
from .calls import Begun, Distinct, Ended, NamedCall, Part, Said, Thought, ToolCall, Written
from .parsers import context_of
from .thoughts import AfterThought, tags_around

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer


FORCED = ("required", "named")  # choices of tools with which the model must write a call
# number of characters that are parsed in one step: at most 10 milliseconds, even for text that consists of tags
PIECE = 1 << 10


def _parser_of(offered: tools.Tools, parser: Any, marks: Marks, context: ReplyContext | None) -> Any:
    """Return a new parser for the text of one choice.  None means that all text is content.

    ``parser`` is a ``ReplyParser``, which receives the context, or a class that ``tools.register`` has added.  Such a
    class with tags receives the marks that stand for them in the text.  Forced calls of a constrained answer
    (``context.strict``) have the format of the parser.  Other forced calls are a list in JSON, which follows reasoning
    if the tags of the reasoning have marks."""
    if context is not None and context.strict and offered.choice in FORCED:
        own = parser.start(context)
        return Distinct(own) if offered.choice == "required" else own
    if offered.choice in FORCED:
        calls = Distinct() if offered.choice == "required" else NamedCall(offered.function)
        if not marks.by_tag:
            return calls
        start, end = marks.by_tag.values()
        return AfterThought(calls, start, end, context is not None and context.opened)
    if isinstance(parser, ReplyParser):
        reads = offered.choice != "none" or parser.thinks()
        return parser.start(context or context_of(offered, marks)) if reads else None
    if offered.choice == "none":
        return None
    return parser(marks.by_tag) if hasattr(parser, "tags") else parser()


def marks_of(offered: tools.Tools, parser: Any, tokenizer: Tokenizer | None) -> Marks:
    """Return the marks (characters that stand for special tokens in the text) of the tags that the parser looks for.

    None are needed if no parser reads the text of the answer."""
    tags = getattr(parser, "tags", None)
    thinks = offered.choice == "none" and isinstance(parser, ReplyParser) and parser.thinks()
    reads = offered.choice == "auto" or thinks
    return Marks.of(tags(), tokenizer) if tags is not None and reads else NO_MARKS


class Reader:
    """The text of one choice as deltas of a message, and the message that the deltas add up to.

    If the length limit cuts a call, the deltas have the part of the call that was generated, and the message does not
    have the call.  Neither has a part of a call as content.

    ``marks`` are the marks of the text.  No part has a mark, because a mark that the parser leaves is replaced by its
    tag.  ``shows_reasoning=False`` omits the reasoning.  ``context`` is the request for a ``ReplyParser``; None means
    that it is made of ``offered`` and ``marks``.
    """

    def __init__(
        self,
        offered: tools.Tools,
        parser: Any,
        marks: Marks = NO_MARKS,
        shows_reasoning: bool = True,
        context: ReplyContext | None = None,
    ) -> None:
        self._offered = offered
        self._shows_reasoning = shows_reasoning
        self._strict = context is not None and context.strict
        self._marks = marks
        self._format = parser if isinstance(parser, ReplyParser) else None
        self._parser = _parser_of(offered, parser, marks, context)
        self._size = 0  # number of characters of the text, and of the reasoning in it
        self._thought_size = 0
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Begun] = []
        self._arguments: list[str] = []  # parts of the arguments of the last call
        self._whole: dict[int, str] = {}  # index in ``_calls`` -> complete arguments

    @property
    def plain(self) -> bool:
        """Return whether all text is content of the message."""
        return self._parser is None

    @property
    def thinks(self) -> bool:
        """Return whether the answer may have reasoning."""
        if self._parser is None or self._format is None:
            return False
        if self._offered.choice in FORCED and not self._strict:
            return isinstance(self._parser, AfterThought)
        return self._format.thinks()

    @property
    def tags(self) -> tuple[str, str] | None:
        """Return the tags around reasoning, or None if the format has no such tags."""
        return tags_around(self._format)

    @property
    def thought_share(self) -> float:
        """Return the part of the text so far that is reasoning, from 0 to 1."""
        return min(self._thought_size / self._size, 1.0) if self._size else 0.0

    def deltas(self, text: str, reason: str | None) -> JsonObject:
        """Return the delta of a message for new text, or {} if the text adds nothing yet.

        ``reason`` is the finish reason, with the last text of the choice."""
        content: list[str] = []
        thoughts: list[str] = []
        calls: dict[int, JsonObject] = {}
        for part in self.parts(text, reason):
            number = len(self._calls) - 1
            if isinstance(part, Said):
                content.append(part.text)
            elif isinstance(part, Thought):
                thoughts.append(part.text)
            elif isinstance(part, Begun):
                calls[number] = {"index": number, **_call(part, "")}
            elif isinstance(part, Written):
                call = calls.setdefault(number, {"index": number, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        delta: JsonObject = {}
        if thoughts:
            delta["reasoning"] = delta["reasoning_content"] = "".join(thoughts)
        if content:
            delta["content"] = "".join(content)
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def parts(self, text: str, reason: str | None) -> Iterator[Part]:
        """Yield the parts of the answer that are certain after new text, and record them for ``message``.

        ``reason`` is the finish reason, with the last text of the choice.  A complete call of a parser is yielded as
        ``Begun``, ``Written`` and ``Ended``."""
        self._size += len(text)
        for part in self._found(text, reason):
            if isinstance(part, Thought):
                self._thought_size += len(part.text)
                if not self._shows_reasoning:
                    continue
            if self._whole and not self._offered.parallel:  # the request allows only one call
                return
            if isinstance(part, ToolCall) and self._offered.allows(part.name):
                for step in (Begun(part.name, part.id), Written(part.arguments), Ended()):
                    self._record(step)
                    yield step
                continue
            if isinstance(part, ToolCall):  # the model was not shown this function, so the text is no call
                part = Said(json.dumps({"name": part.name, "arguments": part.arguments}, ensure_ascii=False))
            self._record(part)
            yield part

    def _record(self, part: Part) -> None:
        """Add a part to the message."""
        if isinstance(part, Said):
            self._content.append(part.text)
        elif isinstance(part, Thought):
            self._thoughts.append(part.text)
        elif isinstance(part, Begun):
            self._calls.append(part)
            self._arguments = []
        elif isinstance(part, Written):
            self._arguments.append(part.text)
        else:
            self._whole[len(self._calls) - 1] = "".join(self._arguments)

    def _found(self, text: str, reason: str | None) -> list[Any]:
        """Return the parts that the parser finds with new text.  If ``reason`` is not None, the answer ends, and what
        the parser held back is included."""
        if self._parser is None:
            return [Said(text)] if text else []
        cut = getattr(self._parser, "cut", None) if reason == "length" else None
        found = list(self._parser.feed(text, reason is not None and cut is None))
        if cut is not None:
            rest = cut()
            # the start of an opening tag is not part of the content of an answer that consists of calls
            found += [part for part in rest if self._offered.choice not in FORCED or not isinstance(part, Said)]
        formatted = self._format is not None and (self._strict or self._offered.choice not in FORCED)
        if formatted or not self._marks.by_tag:
            return found
        return [self._spelled(part) for part in found]

    def _spelled(self, part: Any) -> Any:
        """Return a part of the parser with tags in place of marks."""
        spell = self._marks.spell
        if isinstance(part, (Said, Thought, Written)):
            return replace(part, text=spell(part.text))
        if isinstance(part, ToolCall):
            return replace(part, name=spell(part.name), arguments=spell(part.arguments))
        return replace(part, name=spell(part.name)) if isinstance(part, Begun) else part

    def message(self, role: str = "assistant") -> JsonObject:
        """Return the message of all deltas so far."""
        content = "".join(self._content)
        message: JsonObject = {"role": role, "content": content, "refusal": None}
        if self._thoughts:
            message["reasoning"] = message["reasoning_content"] = "".join(self._thoughts)
        if self._whole:
            calls = []
            for number, arguments in self._whole.items():
                begun = self._calls[number]
                calls.append(_call(begun, arguments))
            message["tool_calls"] = calls
            message["content"] = content.strip() or None
        return message

    def reason(self, reason: str | None) -> str | None:
        """Return the finish reason of a choice: "tool_calls" in place of "stop" if the model chose to call.  None means
        that the choice has not ended.

        A named function ends with "stop", as in OpenAI's API."""
        if reason != "stop" or not self._whole:
            return reason
        named = self._offered.choice == "named"
        return reason if named else "tool_calls"


def pieces_of(text: str, reason: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the pieces of a text, of at most ``PIECE`` characters, and the finish reason with the last of them."""
    last = max(len(text) - PIECE, 0)
    at = 0
    while at < last:
        yield text[at : at + PIECE], None
        at += PIECE
    yield text[at:], reason


def end_of_calls(
    offered: tools.Tools, parser: Any, marks: Marks = NO_MARKS, context: ReplyContext | None = None
) -> Callable[[int, str], bool] | None:
    """Return a function that detects the end of the calls of an answer, or None if generation must not end early.

    The function takes the number of a branch and its new text.  It returns True at a repeated call if calls are
    required, or after the first call if ``parallel_tool_calls`` is false.  ``marks`` are those of the text."""
    if offered.choice != "required" and (offered.choice != "auto" or offered.parallel):
        return None
    parsers: dict[int, Any] = {}

    def ended(sample: int, text: str) -> bool:
        if sample not in parsers:
            parsers[sample] = _parser_of(offered, parser, marks, context)
        found = parsers[sample].feed(text, False)
        if offered.choice == "required":
            return bool(parsers[sample].repeated)
        calls = [part for part in found if isinstance(part, ToolCall)]
        complete = any(isinstance(part, Ended) for part in found)
        return complete or any(offered.allows(call.name) for call in calls)

    return ended


def _call(call: Begun, arguments: str) -> JsonObject:
    """Return a call in the shape of OpenAI's API."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
