"""Regular expressions of JSON Schema (ECMA-262 with the flag ``u``), parsed to a tree and written for a library.

The libraries differ in ``\\s``, ``.``, ``&&`` and other forms.  So they never receive a client's expression, but an
equivalent one of literals, ranges of code points, groups, alternatives and repetitions only.  Other forms (look-around,
back references, word boundaries, anchors in the middle) are refused by name.

Readers of an answer may use Python's ``re`` or ECMA's dialect.  If the two differ in the characters of a class, the
class has only the characters that both have, and ``[^...]`` excludes the characters of either.  So a text that matches
does so in both dialects.  ``exact`` follows ECMA, for expressions whose complement is used.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from .code_points import Ranges, category, complement, decimals, folded, intersection, space, union, words

MOST_DEPTH = 100  # largest number of nested groups
MOST_REPEAT = 1_000_000
EVERYTHING: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # surrogates are no characters
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
ASCII_DIGITS: Ranges = ((48, 57),)
ASCII_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
ASCII_SPACE: Ranges = ((9, 13), (32, 32))
# The control characters of a string of JSON; other control characters are spelled with ``\\u``, see ``json_schema``.
WRITABLE: Ranges = ((8, 10), (12, 13), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF))
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
SHORT_CODES: Ranges = ((8, 10), (12, 13), (34, 34), (92, 92))
QUANTIFIERS = {(0, None): "*", (1, None): "+", (0, 1): "?"}
CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


class _Anchor:
    """``^`` or ``$``."""


START, END = _Anchor(), _Anchor()


@dataclass(frozen=True)
class Chars:
    """A node of the tree: one character out of a set of code points.  An empty set matches nothing."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternatives:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    part: Node
    least: int
    most: int | None


Node = Chars | Sequence | Alternatives | Repeat | _Anchor
EMPTY = Sequence(())
ANYTHING = Repeat(Chars(EVERYTHING), 0, None)


def whole(pattern: str) -> Node:
    """Return the node of the texts that match a pattern from their first to their last character.

    Raise ValueError for a refused pattern.
    """
    return _resolve(pattern, _Reader(pattern, False).read(), EMPTY)


def search(pattern: str, *, exact: bool = False) -> Node:
    """Return the node of the texts that contain a match, as ``pattern`` and ``patternProperties`` of JSON Schema
    require.

    With ``exact``, character classes are those of ECMA-262, because the complement of the expression is used too, and a
    pattern that ignores case raises ValueError.  Otherwise classes contain what both ECMA-262 and Python match.
    """
    return _resolve(pattern, _Reader(pattern, exact).read(), ANYTHING)


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    """A parser (recursive descent) of one pattern."""

    def __init__(self, pattern: str, exact: bool) -> None:
        self.pattern, self.exact = pattern, exact
        self.at = self.depth = 0
        self.ignore_case = self.dot_all = False

    def read(self) -> Node:
        node = self._choice()
        if self.at < len(self.pattern):
            self._refuse("a ) without its (")
        return node

    def _refuse(self, what: str, instead: str = "") -> NoReturn:
        message = f"the regular expression {_shown(self.pattern)} has {what}"
        if instead:
            message += f": {instead}"
        raise ValueError(message)

    def _next(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _take(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _choice(self) -> Node:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            part = self._repeated(self._atom())
            if part != EMPTY:  # an anchor that follows flags or an empty group is still at the edge of the text
                parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        bounds = self._bounds()
        if bounds is None:
            return node
        if isinstance(node, _Anchor):
            self._refuse("an anchor that is repeated")
        self._take("?")  # a lazy repetition matches the same texts
        if self._next() == "+" or self._next() == "*" or self._bounds() is not None:
            self._refuse("a repetition of a repetition", "put (?: ) around the inner one")
        return EMPTY if node == EMPTY else Repeat(node, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        """Read the quantifier at this place, and return its bounds, or None if there is no quantifier."""
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if self._next() != "{":
            return None
        inner = self.pattern[self.at + 1 :].partition("}")[0]
        least, comma, most = inner.partition(",")
        digits = least.isascii() and (least + most).isdigit() and most.isascii()
        if not digits or (comma and not least):
            if digits:
                self._refuse(f"{{{inner}}}", f"write {{0,{most}}}")
            return None  # the brace is a literal
        self.at += len(inner) + 2
        if max(len(least), len(most)) > 8 or max(int(least), int(most or 0)) > MOST_REPEAT:
            self._refuse(f"{{{inner[:20]}}}", f"expected at most {MOST_REPEAT} repetitions")
        high: int | None = int(least)
        if comma:
            high = int(most) if most else None
        if high is not None and high < int(least):
            self._refuse(f"{{{inner}}}", "the second number is smaller than the first")
        return int(least), high

    def _atom(self) -> Node:
        c = self._next()
        self.at += 1
        if c == "^":
            return START
        if c == "$":
            return END
        if c == ".":
            if self.dot_all:
                return Chars(EVERYTHING)
            return Chars(intersection(complement(LINE_ENDS), EVERYTHING))
        if c == "(":
            return self._group()
        if c == "[":
            return self._set()
        if c in "*+?":
            self._refuse(f"{c} with nothing before it")
        if c != "\\":
            return self._character(ord(c))
        if self._next() in ("b", "B"):
            self._refuse(f"the word boundary \\{self._next()}", "say what stands around the word")
        item = self._escape()
        if isinstance(item, int):
            return self._character(item)
        return Chars(intersection(item(False), EVERYTHING))

    def _character(self, code: int) -> Node:
        return Chars(self._fold(((code, code),), False))

    def _group(self) -> Node:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            self._refuse(f"groups within {MOST_DEPTH} others")
        before = self.ignore_case, self.dot_all
        if self._take("?"):
            inline = self._opening()
            if inline:
                self.depth -= 1
                return EMPTY
        node = self._choice()
        if not self._take(")"):
            self._refuse("a ( without its )")
        self.depth -= 1
        self.ignore_case, self.dot_all = before
        return node

    def _opening(self) -> bool:
        """Read the text after ``(?``, and return True for flags of the whole pattern, which Python allows at its
        beginning."""
        for sign in ("=", "!", "<=", "<!"):
            if self.pattern.startswith(sign, self.at):
                self._refuse(f"the look-around (?{sign}", "say what the text is, not what is around it")
        if self._take("P<") or self._take("<"):
            name, end, _ = self.pattern[self.at :].partition(">")
            if not end or not name.isidentifier():
                self._refuse("a group without a name in < >")
            self.at += len(name) + 1
            return False
        begins = self.at == 2
        while self._next() in ("i", "s"):
            if self._next() == "i":
                self.ignore_case = True
            else:
                self.dot_all = True
            self.at += 1
        if self._take(":"):
            return False
        if begins and self.at > 2 and self._take(")"):
            return True
        self._refuse(f"(?{self._next()}", "there are (?:, (?<name>, (?i: and (?s:")

    def _escape(self) -> int | Callable[[bool], Ranges]:
        """Return the code point or the character class after a backslash.

        A class is a function, whose argument decides whether the set includes characters that implementations treat
        differently.
        """
        c = self._next()
        self.at += 1
        if c in CONTROL:
            return CONTROL[c]
        if c and c in "dDsSwW":
            return lambda wide: self._class(c, wide)
        if c in ("p", "P"):
            return self._property(c == "P")
        if c in ("x", "u"):
            return self._hexadecimal(c)
        if c == "c" and self._next().isascii() and self._next().isalpha():
            self.at += 1
            return ord(self.pattern[self.at - 1]) % 32
        if c == "0" and not self._next().isdigit():
            return 0
        if c.isdigit() or c == "k":
            self._refuse(f"the back reference \\{c}", "write out what it stands for")
        if not c or (c.isascii() and c.isalpha()):
            self._refuse(f"the escape \\{c}", "JSON Schema's regular expressions have none such")
        return ord(c)

    def _class(self, letter: str, wide: bool) -> Ranges:
        if letter.isupper():
            return complement(self._class(letter.lower(), not wide))
        if letter == "s":
            return space(python=wide) if self.exact or wide else ASCII_SPACE
        if self.exact or not wide:
            return ASCII_DIGITS if letter == "d" else ASCII_WORD
        return decimals() if letter == "d" else words()

    def _property(self, negated: bool) -> Callable[[bool], Ranges]:
        name, end, _ = self.pattern[self.at + 1 :].partition("}")
        found = category(name) if end and self._next() == "{" else None
        if found is None:
            self._refuse(f"\\p{{{name[:30]}}}", "there are the general categories of Unicode, as \\p{L} or \\p{Letter}")
        self.at += len(name) + 2
        if negated:
            unassigned = category("Cn") or ()
            found = complement(union(found, unassigned))
        return lambda wide: found

    def _hexadecimal(self, letter: str) -> int:
        length = 2 if letter == "x" else 4
        if letter == "u" and self._next() == "{":
            digits, end, _ = self.pattern[self.at + 1 :].partition("}")
            size = len(digits) + 2 if end else 0
        else:
            digits = self.pattern[self.at : self.at + length]
            size = length if len(digits) == length else 0
        code = int(digits, 16) if size and _is_hexadecimal(digits) else -1
        self.at += size
        following = self.pattern[self.at : self.at + 6]
        is_escape = following.startswith("\\u") and _is_hexadecimal(following[2:])
        if 0xD800 <= code < 0xDC00 and is_escape:
            low = int(following[2:], 16)
            if 0xDC00 <= low < 0xE000:
                code = 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
                self.at += 6
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code < 0xE000:
            self._refuse(f"\\{letter} without the number of a character")
        return code

    def _set(self) -> Node:
        negated = self._take("^")
        if self._next() == "]":
            self._refuse("an empty [] or [^]", "a ] that stands for itself is written \\]")
        ranges: Ranges = ()
        while not self._take("]"):
            ends = [self._item()]
            following = self.pattern[self.at + 1 : self.at + 2]
            if self._next() == "-" and following not in ("", "]"):
                self.at += 1
                ends.append(self._item())
            low, high = ends[0], ends[-1]
            if isinstance(low, int) and isinstance(high, int):
                if high < low:
                    self._refuse("a range in [ ] that does not go up")
                found = self._fold(((low, high),), negated)
            else:
                found = union(*(self._set_of(end, negated) for end in ends))
                if len(ends) > 1:  # a hyphen next to a character class is an ordinary character
                    found = union(found, ((45, 45),))
            ranges = union(ranges, found)
        if negated:
            ranges = complement(ranges)
        return Chars(intersection(ranges, EVERYTHING))

    def _set_of(self, item: int | Callable[[bool], Ranges], negated: bool) -> Ranges:
        """Return the set of an item of [ ]."""
        if isinstance(item, int):
            return self._fold(((item, item),), negated)
        return item(negated and not self.exact)

    def _item(self) -> int | Callable[[bool], Ranges]:
        c = self._next()
        if not c:
            self._refuse("a [ without its ]")
        self.at += 1
        if c != "\\":
            return ord(c)
        if self._take("b"):
            return 8
        return self._escape()

    def _fold(self, ranges: Ranges, wide: bool) -> Ranges:
        """Return a set with the other case of its letters if the pattern ignores case.

        ValueError for letters beyond ASCII.
        """
        if not self.ignore_case:
            return ranges
        if self.exact:
            self._refuse("(?i", "names are told apart by case: write both")
        for low, high in ranges:
            codes = range(max(low, 128), min(high, low + 0x3000) + 1)
            if any(map(_has_case, codes)):
                self._refuse("letters beyond ASCII under (?i", "write both cases")
        return folded(ranges, wide)


def _has_case(code: int) -> bool:
    character = chr(code)
    if unicodedata.category(character)[0] not in "LMNS":
        return False
    return character.lower() != character.upper()


def _shown(pattern: str) -> str:
    """Return a pattern in quotes, shortened to 60 characters."""
    if len(pattern) > 60:
        pattern = pattern[:57] + "..."
    return repr(pattern)


def _is_hexadecimal(digits: str) -> bool:
    return digits != "" and all(c in "0123456789abcdefABCDEF" for c in digits)


# ---- anchors ---------------------------------------------------------------------------------------------------------


def _resolve(pattern: str, node: Node, around: Node) -> Node:
    """Return a node without anchors, with ``around`` at each edge of the text that had no anchor."""
    node = _bound(node, True, True, around)
    if _anchored(node):
        problem = "has an anchor in its middle: expected ^ and $ at its ends only"
        raise ValueError(f"the regular expression {_shown(pattern)} {problem}")
    return node


def _bound(node: Node, left: bool, right: bool, around: Node) -> Node:
    if isinstance(node, Alternatives):
        return Alternatives(tuple(_bound(part, left, right, around) for part in node.parts))
    parts: list[Node] = list(node.parts) if isinstance(node, Sequence) else [node]
    if len(parts) == 1 and isinstance(parts[0], (Alternatives, Sequence)):
        return _bound(parts[0], left, right, around)
    if left:
        parts = _edge(parts, START, around)
    if right:
        parts = _edge(parts[::-1], END, around)[::-1]
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _edge(parts: list[Node], anchor: _Anchor, around: Node) -> list[Node]:
    """Return the parts of a sequence that begins at an edge of the text, without its anchors there.

    A sequence without an anchor gets ``around`` in front.  If the first part is a group with anchors, they are resolved
    in the group instead.  For the end of the text, the parts are passed in reverse.
    """
    if parts and parts[0] is anchor:
        while parts and parts[0] is anchor:
            parts = parts[1:]
        return parts
    if parts and isinstance(parts[0], (Alternatives, Sequence)) and _anchored(parts[0]):
        return [_bound(parts[0], anchor is START, anchor is END, around), *parts[1:]]
    if around is EMPTY or (parts and parts[0] is around):
        return parts
    return [around, *parts]


def _anchored(node: Node) -> bool:
    if isinstance(node, (Alternatives, Sequence)):
        return any(_anchored(part) for part in node.parts)
    if isinstance(node, Repeat):
        return _anchored(node.part)
    return isinstance(node, _Anchor)


# ---- writing ---------------------------------------------------------------------------------------------------------


def within(node: Node, ranges: Ranges) -> Node | None:
    """Return the node of the texts that consist of the given characters only, None if there are none."""
    if isinstance(node, Chars):
        kept = intersection(node.ranges, ranges)
        return Chars(kept) if kept else None
    if isinstance(node, Repeat):
        part = within(node.part, ranges)
        if part is None:
            return None if node.least else EMPTY
        return Repeat(part, node.least, node.most)
    assert isinstance(node, (Alternatives, Sequence))
    inner = [within(part, ranges) for part in node.parts]
    parts = tuple(part for part in inner if part is not None)
    if isinstance(node, Alternatives):
        return Alternatives(parts) if parts else None
    return Sequence(parts) if len(parts) == len(inner) else None


def spelled(node: Node) -> Node:
    """Return a regular expression for the JSON spelling of each text of ``node``: characters with a short escape (such
    as \\n) are escaped, all others are written as they are.
    """
    if isinstance(node, Chars):
        short = intersection(node.ranges, SHORT_CODES)
        raw = intersection(node.ranges, complement(SHORT_CODES))
        signs: Ranges = ()
        for low, high in short:
            for code in range(low, high + 1):
                sign = ord(SHORT[code])
                signs = union(signs, ((sign, sign),))
        parts: list[Node] = []
        if raw:
            parts.append(Chars(raw))
        if signs:
            backslash = Chars(((92, 92),))
            parts.append(Sequence((backslash, Chars(signs))))
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))
    if isinstance(node, Repeat):
        return Repeat(spelled(node.part), node.least, node.most)
    assert isinstance(node, (Alternatives, Sequence))
    return type(node)(tuple(map(spelled, node.parts)))


def pattern(node: Node) -> str:
    """Return a regular expression of the whole texts for a grammar library."""
    return f"^(?:{write(node)})$"


def write(node: Node) -> str:
    """Return a node as a regular expression in the syntax that the grammar libraries have in common."""
    # cached for this call only, because a longer cache would reveal patterns of other requests
    sets: dict[Ranges, str] = {}

    def part(node: Node) -> str:
        if isinstance(node, Chars):
            if node.ranges not in sets:
                sets[node.ranges] = _write_set(node.ranges)
            return sets[node.ranges]
        if isinstance(node, Alternatives):
            return "(?:" + "|".join(map(part, node.parts)) + ")"
        if isinstance(node, Repeat):
            inner = part(node.part)
            if isinstance(node.part, (Sequence, Repeat)):
                inner = f"(?:{inner})"
            return inner + quantifier(node)
        assert isinstance(node, Sequence)
        return "".join(map(part, node.parts))

    return part(node)


def quantifier(node: Repeat) -> str:
    sign = QUANTIFIERS.get((node.least, node.most))
    if sign is not None:
        return sign
    if node.least == node.most:
        return f"{{{node.least}}}"
    most = "" if node.most is None else node.most
    return f"{{{node.least},{most}}}"


def _write_set(ranges: Ranges) -> str:
    items = ""
    for low, high in ranges:
        items += _code(low)
        if low != high:
            items += f"-{_code(high)}"
    is_single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return items if is_single else f"[{items}]"


def _code(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{{{code:x}}}"
