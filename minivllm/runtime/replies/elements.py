"""Small pieces of syntax that are matched at a place of a text whose end may still be missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

NO, PARTIAL = -1, -2  # results of a match, in place of the end of the matched text
SPACES = re.compile(r"[ \t\r\n]{0,64}")  # more whitespace within a head is no call
PLACEHOLDER = re.compile(r"\{(?:name|key|id)\}")


class Element(Protocol):
    """A piece of syntax that can be matched at a position of a text."""

    def read(self, text: str, at: int) -> int:
        """Return the index after the element if it is in the text at the index ``at``, ``NO`` if not, or ``PARTIAL`` if
        more text may complete it."""


@dataclass(frozen=True)
class Literal:
    """An element that matches one of several texts."""

    texts: tuple[str, ...]

    def read(self, text: str, at: int) -> int:
        """Return the index after the first of the texts that is at the index ``at``, ``NO`` if none is, or ``PARTIAL``
        if more text may complete one."""
        found = NO
        for literal in self.texts:
            if text.startswith(literal, at):
                return at + len(literal)
            rest = text[at : at + len(literal)]
            if len(rest) < len(literal) and literal.startswith(rest):
                found = PARTIAL
        return found


@dataclass(frozen=True)
class Whitespace:
    """An element that matches whitespace, which may be missing."""

    def read(self, text: str, at: int) -> int:
        """Return the index after the whitespace that begins at the index ``at``; it is ``at`` without whitespace."""
        match = SPACES.match(text, at)
        return match.end() if match else at


@dataclass(frozen=True)
class Word:
    """A text that a pattern matches.

    ``begun`` is a pattern for the beginnings of such texts.  ``name`` is the group of ``match`` for the text.  ``open``
    means that more text may extend a match at the end of the text."""

    pattern: re.Pattern[str]
    begun: re.Pattern[str]
    name: str = ""
    open: bool = True

    def read(self, text: str, at: int) -> int:
        """Return the end of the word at a position, ``NO``, or ``PARTIAL`` if more text may complete it."""
        match = self.pattern.match(text, at)
        if match is not None and (match.end() < len(text) or not self.open):
            return match.end()
        begun = self.begun.match(text, at)
        return PARTIAL if begun is not None and begun.end() == len(text) else NO


@dataclass(frozen=True)
class Lookahead:
    """A pattern that must match at this place, without consuming text."""

    pattern: re.Pattern[str]
    begun: re.Pattern[str]

    def read(self, text: str, at: int) -> int:
        """Return the position if the pattern matches there, ``NO``, or ``PARTIAL`` if more text may complete a
        match."""
        if self.pattern.match(text, at):
            return at
        begun = self.begun.match(text, at)
        return PARTIAL if begun is not None and begun.end() == len(text) else NO


@dataclass(frozen=True)
class Followed:
    """A choice of texts, one of which must follow, without consuming text."""

    literal: Literal

    def read(self, text: str, at: int) -> int:
        """Return the position if one of the texts begins there, ``NO``, or ``PARTIAL`` if more text may complete
        one."""
        end = self.literal.read(text, at)
        return at if end >= 0 else end


NAME = Word(re.compile(r"[A-Za-z0-9_.-]{1,64}"), re.compile(r"[A-Za-z0-9_.-]{0,64}"), "name")
KEY = Word(re.compile(r"[^<>\n\udc80-\udcff]{1,256}"), re.compile(r"[^<>\n\udc80-\udcff]{0,256}"), "key")
ID = Word(re.compile(r"[A-Za-z0-9_-]{1,64}"), re.compile(r"[A-Za-z0-9_-]{0,64}"))
WORDS = {"name": NAME, "key": KEY, "id": ID}
SPACE = Whitespace()
OBJECT_AHEAD = Lookahead(re.compile(r"\{"), re.compile(""))


def matched(elements: Sequence[Element], text: str, at: int) -> tuple[int, str]:
    """Return the end of a sequence of elements, ``NO`` or ``PARTIAL``, and the text of its named element."""
    found = ""
    for element in elements:
        end = element.read(text, at)
        if end < 0:
            return end, found
        if isinstance(element, Word) and element.name:
            found = text[at:end]
        at = end
    return at, found


@dataclass(frozen=True)
class Templates:
    """Converts templates of call syntax, such as "<call>{name}", to elements (pieces that are matched in order).

    ``spellings`` has, for each tag in a template, the texts that stand for it in a reply."""

    spellings: Mapping[str, tuple[str, ...]]

    def elements(self, template: str) -> list[Element]:
        """Return the elements of a template: a word for each placeholder, whitespace, and literal texts."""
        found: list[Element] = []
        for piece in self.split(template):
            if PLACEHOLDER.fullmatch(piece):
                found.append(WORDS[piece[1:-1]])
            elif piece.isspace():
                found.append(SPACE)
            else:
                found.append(Literal(self.spellings.get(piece, (piece,))))
        return found

    def split(self, template: str) -> list[str]:
        """Return the placeholders, the whitespace, the tags and the other text of a template."""
        return [piece for piece in self._separate.split(template) if piece]

    @cached_property
    def _separate(self) -> re.Pattern[str]:
        """Return the pattern that matches placeholders, whitespace and tags."""
        tags = sorted(self.spellings, key=len, reverse=True)
        separate = "|".join([PLACEHOLDER.pattern, r"\s+", *map(re.escape, tags)])
        return re.compile(f"({separate})")


def beginnings(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern for the beginning of one of some texts at the end of a text, or None without such texts."""
    patterns = [_prefixes(text) for text in texts if len(text) > 1]
    return re.compile(f"(?:{'|'.join(patterns)})\\Z") if patterns else None


def _prefixes(text: str) -> str:
    """Return a pattern that matches every beginning of a text but not all of it."""
    pattern = ""
    for char in reversed(text[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(text[0]) + pattern
