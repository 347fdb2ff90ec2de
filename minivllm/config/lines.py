"""Find the line of each value in a TOML file, which ``tomllib`` does not report.

The scanner reads text that ``tomllib`` has accepted, so it checks nothing.  It follows keys, tables and lists and skips
everything else. https://toml.io/en/v1.0.0
"""

from __future__ import annotations

import re
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Place = tuple["str | int", ...]

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.S,
)
_OTHER = re.compile(r"[^,\]}\n#]*")  # numbers, booleans, dates


def toml_lines(text: str) -> dict[Place, int]:
    """Return the line (from 1) of each key and list element, by its path: ``("scheduler", "options", "window") ->
    7``."""
    return _Scanner(text).run()


class _Scanner:
    """A TOML text, and the position ``at`` of the next unread character."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.lines: dict[Place, int] = {}
        self.lists: dict[Place, int] = {}  # path of a list of tables ([[...]]) -> index of the newest element
        self._counted = 0
        self._line = 1

    def run(self) -> dict[Place, int]:
        """Scan the text, and return the line of each key and list element by its path."""
        prefix: Place = ()
        self._skip()
        while self.at < len(self.text):
            line = self._here()
            if self._take("[["):
                path = self._header(self._key())
                self.lists[path] = self.lists.get(path, -1) + 1
                prefix = (*path, self.lists[path])
                self.lines[prefix] = line
                self._note(path, line)
                self._take("]]")
            elif self._take("["):
                prefix = self._header(self._key(), whole=True)
                self._note(prefix, line)
                self._take("]")
            else:
                self._pair(prefix)
            self._skip()
        return self.lines

    def _header(self, key: Place, whole: bool = False) -> Place:
        """Return the path of a table.  A path through a list of tables leads to the newest element."""
        path: Place = ()
        for i, part in enumerate(key, 1):
            path = (*path, part)
            if path in self.lists and (whole or i < len(key)):
                path = (*path, self.lists[path])
        return path

    def _pair(self, prefix: Place) -> None:
        """Scan a key and its value, in the table ``prefix``."""
        line = self._here()
        key = self._key()
        for i in range(1, len(key) + 1):
            self._note((*prefix, *key[:i]), line)
        self._skip()
        self._take("=")
        self._skip()
        self._value((*prefix, *key))

    def _value(self, path: Place) -> None:
        """Scan a value of the TOML text, and note the lines of its parts.  ``path`` is the path of the value in the
        file."""
        if self._take("{"):
            self._skip()
            while not self._take("}"):
                self._pair(path)
                self._skip()
                self._take(",")
                self._skip()
        elif self._take("["):
            self._skip()
            index = 0
            while not self._take("]"):
                self._note((*path, index), self._here())
                self._value((*path, index))
                self._skip()
                self._take(",")
                self._skip()
                index += 1
        else:
            self._match(_STRING) or self._match(_OTHER)

    def _key(self) -> Place:
        """Scan a dotted key and return its parts."""
        parts: list[str] = []
        while True:
            self._skip()
            quoted = self._match(_STRING)
            parts.append(tomllib.loads(f"key = {quoted}")["key"] if quoted else self._match(_BARE))
            self._skip()
            if not self._take("."):
                return tuple(parts)

    def _note(self, path: Place, line: int) -> None:
        """Record the line of a path if no line is recorded yet."""
        self.lines.setdefault(path, line)

    def _here(self) -> int:
        """Return the line of the current position."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def _skip(self) -> None:
        """Skip whitespace and comments."""
        self._match(_SPACE)

    def _take(self, mark: str) -> bool:
        """Skip ``mark`` if the text continues with it, and return whether it did."""
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) if found else 0
        return found

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Skip and return the text that matches a pattern, or ""."""
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found[0] if found else ""
