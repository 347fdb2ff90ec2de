"""Function calls that a model writes as JSON, parsed while the text is generated.  Arguments keep the model's spelling.

    [{"name": "f", "arguments": {...}}, ...]
              └ Begun       └ Written, Written, ... └ Ended

A parser reports a call either as ``Begun``, ``Written`` and ``Ended`` while it is generated, or as one ``ToolCall``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minivllm.runtime.replies import NAME as NAME
from minivllm.runtime.replies import Begun, Ended, Said, Thought, Written, new_id
from minivllm.runtime.replies.values import is_json as is_json

HEAD = re.compile(r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)', re.S)
OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')  # significant characters outside and inside a string


@dataclass(frozen=True)
class ToolCall:
    """A complete call.  ``arguments`` is JSON text.  The server makes the ``id``."""

    name: str
    arguments: str
    id: str = field(default_factory=new_id)


@dataclass(frozen=True)
class Finished:
    """The end of an answer, with its finish reason ("stop", "length", "tool_calls", "abort") and the stop string or
    token id that ended it, if any."""

    reason: str | None
    stop: int | str | None = None


# a part of an answer; the parts have the order of the text
Part = Said | Thought | Begun | Written | Ended | Finished


class NamedCall:
    """Parser of an answer that calls a named function.  Its grammar allows only the arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False
        self._text = ""

    def feed(self, text: str, final: bool) -> list[Begun | Written | Ended]:
        """Return the parts of the call in new text.  ``final`` marks the end of the answer."""
        found: list[Begun | Written | Ended] = [] if self._begun else [Begun(self._name)]
        self._begun = True
        self._text += text
        if text:
            found.append(Written(text))
        if final and is_json(self._text):
            found.append(Ended())
        return found


class Forced:
    """Parser of an answer that must call a function.  Its grammar allows only a list of calls."""

    def __init__(self) -> None:
        self._left = ""
        self._in_call = False
        self._depth = 0  # number of open brackets of the arguments so far
        self._quoted = False  # whether the arguments so far end inside a string

    def feed(self, text: str, final: bool) -> list[Begun | Written | Ended]:
        """Return the parts of calls in new text.  A call begins when its name is complete.

        If the list is cut, its last call may have no ``Ended``, and an incomplete name is dropped."""
        self._left += text
        found: list[Begun | Written | Ended] = []
        while True:
            if self._in_call:
                end, whole = self._end_of_arguments()
                if end:
                    found.append(Written(self._left[:end]))
                self._left = self._left[end + whole :]  # the "}" after the arguments is dropped
                if not whole:
                    return found
                found.append(Ended())
                self._in_call = False
            head = HEAD.match(self._left)
            if head is None:
                return found
            self._left = self._left[head.end() :]
            self._in_call = True
            self._depth = 0
            self._quoted = False
            found.append(Begun(json.loads(head[1])))

    def _end_of_arguments(self) -> tuple[int, bool]:
        """Return the number of characters that surely belong to the arguments, and whether the end of the call follows
        them."""
        text = self._left
        at = 0
        while True:
            match = (INSIDE if self._quoted else OUTSIDE).search(text, at)
            if match is None:
                return len(text), False
            at, char = match.end(), match[0]
            if char == "\\":
                if at == len(text):  # the escaped character is not generated yet
                    return at - 1, False
                at += 1
            elif char == '"':
                self._quoted = not self._quoted
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0:
                return at - 1, True
            else:
                self._depth -= 1


class Distinct:
    """Parser of an answer that must call, without repeated calls.

    A grammar that requires calls makes a model repeat itself when it has no further call.  ``repeated`` is set at the
    first repeated call.  A call is held back while it may still become equal to an earlier one.

    ``calls`` is the parser of the answer; None means a list in JSON."""

    def __init__(self, calls: Any = None) -> None:
        self._calls = Forced() if calls is None else calls
        self._made: set[tuple[str, str]] = set()
        self._held: list[Part] = []
        self._name = ""
        self._text = ""  # arguments of the last call
        self._holds = False  # whether the last call is held back, because it may become equal to an earlier call
        self.repeated = False

    def feed(self, text: str, final: bool) -> list[Part]:
        """Return the parts of new calls, as ``Forced.feed`` does.  ``final`` also returns a held, incomplete call."""
        return self._distinct(self._calls.feed(text, final), final)

    def cut(self) -> list[Part]:
        """Return the rest of an answer that the length limit has cut."""
        cut = getattr(self._calls, "cut", None)
        return self._distinct(self._calls.feed("", True) if cut is None else cut(), True)

    def _distinct(self, parts: Iterable[Part], final: bool) -> list[Part]:
        """Return parts without the parts of repeated calls."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, (Said, Thought)):
                self._held.append(part)
                continue
            if isinstance(part, Begun):
                self._name = part.name
                self._text = ""
                self._holds = any(name == part.name for name, _ in self._made)
            elif isinstance(part, Written):
                self._text += part.text
                earlier = (arguments for name, arguments in self._made if name == self._name)
                self._holds = self._holds and any(arguments.startswith(self._text) for arguments in earlier)
            elif (self._name, self._text) in self._made:
                self._held = []
                self.repeated = True
                continue
            else:
                self._made.add((self._name, self._text))
                self._holds = False
            self._held.append(part)
            if not self._holds:
                found += self._held
                self._held = []
        if (final and not self.repeated) or not self._holds:
            found += self._held
            self._held = []
        return found


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text, {} for an empty text, or None for any other text."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
