"""Arguments in JSON, divided from the text that follows them.  They keep the model's spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .plan import MARK, FormPlan

INSIDE = re.compile(rf'["\\]|{MARK}')  # characters to look at within a string: a quotation mark, a backslash or a mark
CLOSING = {"{": "}", "[": "]"}
LONGEST = 64  # largest number of characters of a tag


class Scanner:
    """The open brackets and strings of the arguments of one call."""

    def __init__(self) -> None:
        self._open: list[str] = []  # closing brackets of the open objects and lists
        self.quoted = False

    def read(
        self, text: str, at: int, form: FormPlan, final: bool, shown: Callable[[str], str]
    ) -> tuple[list[str], int, bool]:
        """Return the arguments in new text, the position up to which it was read, and whether the arguments have ended.

        A closing tag outside a string ends incomplete arguments; their open brackets are closed.  ``shown`` returns the
        text of a mark within a string.
        """
        pieces: list[str] = []
        start = at
        while True:
            match = (INSIDE if self.quoted else form.outside).search(text, at)
            if match is None:
                stop = self._hold_from(text, at, form, final)
                pieces.append(text[start:stop])
                return pieces, stop, False
            found = match[0]
            at = match.end()
            if found == '"':
                self.quoted = not self.quoted
            elif found in CLOSING:
                self._open.append(CLOSING[found])
            elif found in "}]":
                if self._open:
                    self._open.pop()
                if not self._open:
                    pieces.append(text[start:at])
                    return pieces, at, True
            elif found == "\\":
                if at == len(text):  # the escaped character is not here yet
                    pieces.append(text[start : at - 1])
                    return pieces, at - 1, False
                at += 1
            elif not self.quoted and found in form.closers:
                pieces += [text[start : match.start()], self.rest()]
                return pieces, match.start(), True
            else:  # a character that belongs to no value
                escaped = json.dumps(shown(found), ensure_ascii=False)[1:-1]
                pieces += [text[start : match.start()], escaped if self.quoted else shown(found)]
                start = at

    def rest(self) -> str:
        """Return the closing brackets of the open objects and lists."""
        return "".join(reversed(self._open))

    def _hold_from(self, text: str, at: int, form: FormPlan, final: bool) -> int:
        """Return the position of a closing tag that may begin at the end of a text, else the end of the text."""
        if self.quoted or final or form.begun_closer is None:
            return len(text)
        begun = form.begun_closer.search(text, max(at, len(text) - LONGEST))
        return begun.start() if begun else len(text)
