"""Reasoning before a constrained answer (a form): the tags of the parser, and the parser of forced calls behind
reasoning."""

from __future__ import annotations

from typing import Any

from minivllm.runtime.replies import DescribedParser, ReplyParser
from minivllm.runtime.replies.output import Output
from minivllm.runtime.replies.thinking import BUDGET, TAGS
from minivllm.runtime.text.marks import Marks
from minivllm.runtime.text.thinking import tags_of
from minivllm.runtime.text.tokenizer import Tokenizer
from minivllm.server.errors import ApiError

from . import JsonObject


def tags_around(parser: Any) -> tuple[str, str] | None:
    """Return the tags before and after the reasoning of a parser's format, or None."""
    reasoning = parser.format.reasoning if isinstance(parser, DescribedParser) else None
    return None if reasoning is None else (reasoning.open.strip(), reasoning.close)


def form_begins_behind(parser: Any, tokenizer: Tokenizer | None) -> bool:
    """Return whether a constrained form begins after reasoning: the parser finds reasoning, and the model has tags
    for it."""
    if tokenizer is None or not isinstance(parser, ReplyParser) or not parser.thinks():
        return False
    return tags_of(tokenizer) is not None


def marks_of_thoughts(parser: Any, tokenizer: Tokenizer | None, parameters: JsonObject) -> Marks | None:
    """Return the marks (characters that stand for special tokens in the text) of the tags around the reasoning before
    forced calls.  None means that the answer begins with the calls.

    ApiError (400) if the request bounds the reasoning, or names tags, and the parser cannot find the reasoning."""
    tags = tags_around(parser)
    found = None
    if tags is not None and form_begins_behind(parser, tokenizer):
        marks = Marks.of(tags, tokenizer)
        found = marks if len(marks.by_tag) == len(tags) else None
    bounded = parameters.get(BUDGET) not in (None, -1)
    if found is None and (bounded or parameters.get(TAGS) is not None):
        name = BUDGET if bounded else TAGS
        text = "this server finds no reasoning before forced calls of this model; leave it out, or use tool_choice=auto"
        raise ApiError(400, f"{name}: {text}", name)
    return found


class AfterThought:
    """Parser of an answer that reasons and then must call.

    ``calls`` is the parser of the calls, and ``start`` and ``end`` are the marks of the tags around the reasoning.
    ``opened`` means that the prompt ends within the reasoning.  A start tag may only be the first token of the answer,
    because a grammar allows nothing else."""

    def __init__(self, calls: Any, start: str, end: str, opened: bool) -> None:
        self._calls = calls
        self._start, self._end = start, end
        self._thinks = opened
        self._begun = opened
        self._out = Output()  # removes whitespace at both ends of the reasoning
        self._out.begin_thought()

    def feed(self, text: str, final: bool) -> list[Any]:
        """Return the reasoning and the parts of the calls in new text.  ``final`` marks the end of the answer."""
        if not self._begun and text:
            self._begun = True
            self._thinks = text.startswith(self._start)
            text = text.removeprefix(self._start)
        if not self._thinks:
            return list(self._calls.feed(text, final))
        thought, mark, rest = text.partition(self._end)
        self._out.add_reasoning(thought)
        found: list[Any] = [*self._out.take()]
        if mark:
            self._thinks = False
            found += self._calls.feed(rest, final)
        return found

    @property
    def repeated(self) -> bool:
        """Return whether the model has repeated a call."""
        return bool(self._calls.repeated)
