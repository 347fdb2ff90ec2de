"""The parser seam (plug-in interface): reasoning and calls of functions in the text of a model.

A ``ReplyParser`` exists once for each server.  ``start`` returns the parser of one answer.  It receives the text in
pieces of one or several tokens, in any division, and returns the parts that are certain.  The joined parts do not
depend on the division into pieces.

Tags, such as ``<tool_call>``, are tokens of most vocabularies.  The server replaces each token that is a tag by a
*mark*, a lone surrogate character (U+DC80 and following), which no decoded text contains.  So a tag is never split, and
differs from text of other tokens that spells it.  A parser removes the marks: no surrogate is in a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .parts import Part

API = (1, 0)
FIRST_MARK = 0xDC80  # code point of the first mark; mark k is the code point FIRST_MARK + k
MOST_TAGS = 128  # largest number of tags, whose marks are the surrogates U+DC80 to U+DCFF


@dataclass(frozen=True)
class ReplyContext:
    """The request of an answer, and the marks in its text.

    ``functions`` maps the name of each function to the JSON schema of its parameters.  ``only`` has the names that the
    model may call, or is None if it may call any name.  ``marks`` has the mark of each tag that is a token.  ``hidden``
    names the tags that leave no text if they belong to no reasoning or call, which are the special tokens.  ``opened``
    means that the prompt ends within the reasoning.  ``calls`` is False if text is never a call.  ``strict`` means that
    a grammar constrains the calls.  With ``behind``, calls begin after the reasoning, and calls in the reasoning are
    text.  With ``answer``, an answer whose content begins with "{" is JSON, in which tags are text.
    """

    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only: frozenset[str] | None = None
    marks: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    opened: bool = False
    calls: bool = True
    strict: bool = False
    behind: bool = False
    answer: bool = False


class Reply(Protocol):
    """The parser of one answer."""

    def feed(self, text: str, final: bool = False) -> Sequence[Part]:
        """Return the parts of the answer (content, reasoning, calls) that are certain after new text.

        ``final`` ends the answer and returns all of the rest."""

    def cut(self) -> Sequence[Part]:
        """Return the rest of an answer that the length limit has cut, without an incomplete call.

        It is called once, in place of ``feed`` with ``final``.  The text of an incomplete call is not returned."""


class ReplyParser(ABC):
    """The format of a model's replies."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def tags(self) -> tuple[str, ...]:
        """Return the texts of the format's tags.  The server marks the tags that are tokens of the vocabulary."""
        return ()

    def thinks(self) -> bool:
        """Return whether replies may have reasoning.  Without it, a request without tools needs no parser."""
        return True

    def opens(self, prompt: str) -> bool:
        """Return whether a prompt, or its last part, ends within the reasoning, which the answer then continues."""
        return False

    @abstractmethod
    def start(self, context: ReplyContext) -> Reply:
        """Return the parser of one answer."""
