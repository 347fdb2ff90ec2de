"""Calls of functions as a model writes them in JSON: read as the text comes, arguments exactly as they were written.

    [{"name": "f", "arguments": {...}}, ...]
              └ Begun       └ Written, Written, ... └ Ended

A call that comes in pieces is ``Begun`` once its name is known; a ``ToolCall`` is whole at once.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SPACE = re.compile(r"[ \t\n\r]*")
HEAD = re.compile(r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)', re.S)
OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')  # what matters outside of a string, and in one
DECODER = json.JSONDecoder()


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call; ``arguments`` is JSON text.  ``id`` is ours."""

    name: str
    arguments: str
    id: str = field(default_factory=new_id)


@dataclass(frozen=True)
class Begun:
    """A call whose arguments come in pieces; the pieces that follow are its own until the next one is begun."""

    name: str
    id: str = field(default_factory=new_id)


@dataclass(frozen=True)
class Written:
    """More of the arguments of the call that was begun last."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The arguments of the call that was begun last are whole."""


class Named:
    """The arguments of one function, which the grammar of a named choice leaves and nothing else."""

    def __init__(self, name: str) -> None:
        self._name, self._begun, self._text = name, False, ""

    def feed(self, text: str, final: bool) -> list[Begun | Written | Ended]:
        found: list[Begun | Written | Ended] = [] if self._begun else [Begun(self._name)]
        self._begun = True
        self._text += text
        if text:
            found.append(Written(text))
        if final and is_json(self._text):
            found.append(Ended())
        return found


class Forced:
    """The list of calls that the grammar of ``required`` leaves: each is begun when its name is there."""

    def __init__(self) -> None:
        self._left, self._in_call = "", False
        self._depth, self._quoted = 0, False  # of the arguments so far

    def feed(self, text: str, final: bool) -> list[Begun | Written | Ended]:
        """Of a list that was cut the last call may have no end; what came of a name that is not whole is dropped."""
        self._left += text
        found: list[Begun | Written | Ended] = []
        while True:
            if self._in_call:
                end, whole = self._end_of_arguments()
                if end:
                    found.append(Written(self._left[:end]))
                self._left = self._left[end + whole :]  # the "}" behind the arguments goes too
                if not whole:
                    return found
                found.append(Ended())
                self._in_call = False
            head = HEAD.match(self._left)
            if head is None:
                return found
            self._left = self._left[head.end() :]
            self._in_call, self._depth, self._quoted = True, 0, False
            found.append(Begun(json.loads(head[1])))

    def _end_of_arguments(self) -> tuple[int, bool]:
        """(characters that are certainly of the arguments, whether the end of the call follows them)."""
        text, at = self._left, 0
        while True:
            match = (INSIDE if self._quoted else OUTSIDE).search(text, at)
            if match is None:
                return len(text), False
            at, char = match.end(), match[0]
            if char == "\\":
                if at == len(text):  # what it escapes is still to come
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
    """The calls of ``Forced`` without those that were made before: a model that the grammar makes call again has
    nothing else to say.  ``repeated`` is set at the first one.

    A call is held back while it may still become one that is there."""

    def __init__(self) -> None:
        self._calls = Forced()
        self._made: set[tuple[str, str]] = set()
        self._held: list[Begun | Written | Ended] = []
        self._name, self._text, self._holds = "", "", False
        self.repeated = False

    def feed(self, text: str, final: bool) -> list[Begun | Written | Ended]:
        """Return what is new, as ``Forced.feed`` does; with ``final``, what was held back of a call without end too."""
        found: list[Begun | Written | Ended] = []
        for one in self._calls.feed(text, final):
            if isinstance(one, Begun):
                self._name, self._text = one.name, ""
                self._holds = any(name == one.name for name, _ in self._made)
            elif isinstance(one, Written):
                self._text += one.text
                like = (made for name, made in self._made if name == self._name)
                self._holds = self._holds and any(made.startswith(self._text) for made in like)
            elif (call := (self._name, self._text)) in self._made:
                self._held, self.repeated = [], True
                continue
            else:
                self._made.add(call)
                self._holds = False
            self._held.append(one)
            if not self._holds:
                found += self._held
                self._held = []
        if final and not self.repeated:
            found += self._held
            self._held = []
        return found


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it is written.  ValueError for anything else."""
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    found: dict[str, str] = {}
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        if found:
            at = _skip(text, _expect(text, at, ","))
        key, at = _value(text, at)
        if not key.startswith('"'):
            raise ValueError("no key")
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        found[json.loads(key)], at = _value(text, at)
        at = _skip(text, at)
    if _skip(text, at + 1) != len(text):
        raise ValueError("more than an object")
    return found


def elements(text: str) -> Iterator[str]:
    """The elements of a JSON list, or one value alone, each as it is written; of a text that ends early those that are
    whole.  ValueError at the first thing that is none."""
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        value, at = _value(text, at)
        if _skip(text, at) != len(text):
            raise ValueError("more than a value")
        yield value
        return
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        value, at = _value(text, at)
        yield value
        at = _skip(text, at)
        if text[at : at + 1] != "]":
            at = _skip(text, _expect(text, at, ","))
    if _skip(text, at + 1) != len(text):
        raise ValueError("more than a list")


def call_of(text: str) -> ToolCall | None:
    """A call from {"name", "arguments"} (or "parameters"); None if the text is not one."""
    try:
        parts = members(text)
        name = json.loads(parts.get("name", "null"))
        raw = parts.get("arguments", parts.get("parameters", "{}"))
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(value, (dict, str)):
        return None
    return ToolCall(name, value if isinstance(value, str) else raw)


def calls_of(text: str) -> tuple[list[ToolCall], bool]:
    """The calls at the beginning of a text that is one or a list of them, and whether it is nothing but that."""
    found: list[ToolCall] = []
    try:
        for one in elements(text):
            if (call := call_of(one)) is None:
                return found, False
            found.append(call)
    except (ValueError, RecursionError):
        return found, False
    return found, bool(found)


def begins_call(text: str) -> bool:
    """Whether the text, or its first element if it is a list, is the beginning of a call."""
    return any(begun.fullmatch(text) for begun in _BEGUN)


def _beginning(argument: str) -> re.Pattern[str]:
    """Matches every beginning of a call with that key: piece by piece, each only behind the one before."""
    pieces = [
        r"\s*",
        r"\[?",
        r"\s*",
        r"\{",
        r"\s*",
        *'"name"',
        r"\s*",
        ":",
        r"\s*",
        '"',
        r"[A-Za-z0-9_.-]{0,64}",
        '"',
        r"\s*",
        ",",
        r"\s*",
        *f'"{argument}"',
        r"\s*",
        ":",
        ".*",
    ]
    pattern = ""
    for piece in reversed(pieces):
        pattern = f"(?:{piece}{pattern})?"
    return re.compile(pattern, re.S)


_BEGUN = [_beginning(key) for key in ("arguments", "parameters")]


def _skip(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def _expect(text: str, at: int, char: str) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"no {char}")
    return at + 1


def _value(text: str, at: int) -> tuple[str, int]:
    """The JSON value that begins there, as it is written, and where it ends."""
    _, end = DECODER.raw_decode(text, at)
    return text[at:end], end
