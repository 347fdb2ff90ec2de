"""The end of a text in brackets, found while the text comes in pieces.  No character is looked at twice."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .elements import beginnings

JSON_OUTSIDE = re.compile(r'["{}\[\]]')
JSON_QUOTE = re.compile('"')
JSON_INSIDE = re.compile(r'["\\]')
PYTHON_OUTSIDE = re.compile(r"""["'()\[\]{}]""")
OPENING = frozenset("([{")
MOST_DEPTH = 64
LONGEST = 64  # largest number of characters of a quotation mark, which may be a tag


class Brackets:
    """A search for the bracket that closes the outermost bracket of a text.  Brackets in strings do not count.

    ``outside`` is the pattern of brackets and opening quotation marks.  ``inside`` maps an opening quotation mark to
    the pattern of the marks that close the string, and of a backslash if it escapes the next character.  ``depth`` is
    the number of brackets that are open before the text.  A quotation mark may be a tag of several characters.
    ``begun`` is the pattern of a mark that is incomplete at the end of the text, or None if no mark can be incomplete.
    ``deep`` becomes and stays True when more than ``MOST_DEPTH`` brackets are open; the search has then failed.
    """

    def __init__(
        self,
        outside: re.Pattern[str],
        inside: dict[str, re.Pattern[str]],
        depth: int = 0,
        begun: re.Pattern[str] | None = None,
    ) -> None:
        self._outside, self._inside, self._begun = outside, inside, begun
        self._depth = depth
        self._quote = ""
        self._search = outside.search  # of ``outside``, or of the pattern in ``inside`` while a string is open
        self.deep = False

    def skips(self, text: str) -> bool:
        """Return whether a text cannot change the open brackets and the open string: it has no match of the present
        pattern, and no incomplete quotation mark at its end."""
        if self._search(text):
            return False
        return self._begun is None or not self._begun.search(text)

    def end(self, text: str, at: int) -> tuple[int, int]:
        """Read a text from position ``at``.  Return the position after the bracket that closes the outermost one, or -1
        if the text has no such bracket, and the position up to which the text was read.

        The next call must have the text after that position again, with more text behind it.
        """
        stop = len(text)
        if self._begun is not None:
            cut = self._begun.search(text, max(at, stop - LONGEST))
            stop = cut.start() if cut else stop
        while True:
            match = self._search(text, at, stop)
            if match is None:
                return -1, max(at, stop)
            found = match[0]
            if found == "\\":
                if match.end() == len(text):
                    return -1, match.start()
                at = match.end() + 1
                continue
            at = match.end()
            if self._quote:
                self._quote = ""
                self._search = self._outside.search
            elif found in self._inside:
                self._quote = found
                self._search = self._inside[found].search
            elif found in OPENING:
                self._depth += 1
                if self._depth > MOST_DEPTH:
                    self.deep = True
                    return -1, at
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at, at


class OpenString:
    """Finds out whether a JSON text, which comes in pieces, ends within a string (``quoted``)."""

    def __init__(self) -> None:
        self.quoted = False
        self._escaped = False

    def add(self, text: str) -> None:
        """Read a further piece of the JSON text, and set ``quoted`` to whether it ends inside a string."""
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while True:
            match = (JSON_INSIDE if self.quoted else JSON_QUOTE).search(text, at)
            if match is None:
                return
            at = match.end()
            if match[0] == '"':
                self.quoted = not self.quoted
                continue
            self._escaped = at == len(text)
            at += 1


def json_brackets() -> Brackets:
    """Return a ``Brackets`` that finds the end of a JSON object."""
    return Brackets(JSON_OUTSIDE, {'"': JSON_INSIDE})


def python_brackets() -> Brackets:
    """Return a ``Brackets`` that finds the end of a call in Python whose first bracket has been read."""
    inside = {quote: re.compile(rf"[{quote}\\]") for quote in ("'", '"')}
    return Brackets(PYTHON_OUTSIDE, inside, depth=1)


def quoted_brackets(quotes: Sequence[str]) -> Brackets:
    """Return a ``Brackets`` that finds the end of an object whose strings are enclosed in two ``quotes``."""
    either = "|".join(map(re.escape, quotes))
    inside = {quote: re.compile(either) for quote in quotes}
    inside['"'] = JSON_INSIDE
    return Brackets(re.compile(rf'{either}|["{{}}\[\]]'), inside, begun=beginnings(quotes))
