"""Represent sets of code points as sorted ranges that do not touch, with the named sets of regular expressions."""

from __future__ import annotations

import unicodedata
from functools import cache
from itertools import groupby

Ranges = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
# Between these two nothing is assigned; it is looked at once, and every property holds for all of it or for none.
UNASSIGNED = (0x40000, 0xDFFFF)
ECMA_SPACE: Ranges = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
PYTHON_SPACE: Ranges = ((0x1C, 0x1F), (0x85, 0x85))  # that ECMA's has not
LONG = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Symbol": "S", "Math_Symbol": "Sm",
    "Currency_Symbol": "Sc", "Separator": "Z", "Space_Separator": "Zs", "Control": "Cc",
}  # fmt: skip
KINDS = {"L": "ultmo", "M": "nce", "N": "dlo", "P": "cdseifo", "S": "mcko", "Z": "slp", "C": "cfon"}
CATEGORIES = frozenset((*KINDS, *(kind + more for kind, inner in KINDS.items() for more in inner)))


def union(*sets: Ranges) -> Ranges:
    """Return the union of some sets."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(r for ranges in sets for r in ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], high))
        else:
            made.append((low, high))
    return tuple(made)


def complement(ranges: Ranges) -> Ranges:
    """Return all code points outside a set."""
    made, at = [], 0
    for low, high in union(ranges):
        if at < low:
            made.append((at, low - 1))
        at = high + 1
    return (*made, (at, LAST)) if at <= LAST else tuple(made)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Return the code points that are in both sets."""
    made = [(max(a, c), min(b, d)) for a, b in one for c, d in other if a <= d and c <= b]
    return union(tuple(made)) if len(made) > 1 else tuple(made)


def space(python: bool) -> Ranges:
    r"""Return the code points of ECMA's ``\\s``, with ``python`` also those of ``\\s`` in Python's ``re``."""
    return union(ECMA_SPACE, PYTHON_SPACE) if python else ECMA_SPACE


def decimals() -> Ranges:
    r"""Return the code points of ``\\d`` in Python's ``re``."""
    return category("Nd") or ()


def words() -> Ranges:
    r"""Return the code points of ``\\w`` in Python's ``re``."""
    return tables()[1]


def category(name: str) -> Ranges | None:
    """Return a general category of Unicode by its short or long name, None for an unknown name."""
    name = name.removeprefix("General_Category=").removeprefix("gc=")
    name = LONG.get(name, name)
    return tables()[0].get(name, ()) if name in CATEGORIES else None


@cache
def tables() -> tuple[dict[str, Ranges], Ranges]:
    r"""Return the general categories, and the code points of ``\\w`` in Python's ``re``.

    All sets are computed together, before the first grammar is compiled.  If they were computed at their first use, the
    time of a request would reveal whether an earlier request had used a set.
    """
    spans = [(0, UNASSIGNED[0] - 1), (UNASSIGNED[1] + 1, 0xE0FFF), (0xFFFFE, 0xFFFFF), (0x10FFFE, LAST)]
    blocks = (UNASSIGNED, (0xE1000, 0xEFFFF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
    found: dict[str, list[tuple[int, int]]] = {"": []}
    for low, high in blocks:
        found.setdefault(unicodedata.category(chr(low)), []).append((low, high))
    for low, high in spans:
        for name, run in groupby(range(low, high + 1), lambda code: unicodedata.category(chr(code))):
            codes = list(run)
            found.setdefault(name, []).append((codes[0], codes[-1]))
        for holds, run in groupby(range(low, high + 1), lambda code: code == 95 or chr(code).isalnum()):
            if holds:
                codes = list(run)
                found[""].append((codes[0], codes[-1]))
    made = {name: union(tuple(ranges)) for name, ranges in found.items()}
    word = made.pop("")
    kinds = {kind: union(*(ranges for name, ranges in made.items() if name[0] == kind)) for kind in KINDS}
    return made | kinds, word


def folded(ranges: Ranges, wide: bool) -> Ranges:
    """Return a set with the other case of its ASCII letters, and with ``wide`` also all characters that fold to a
    letter.
    """
    found = [ranges]
    for code in (*range(65, 91), *range(97, 123)):
        if any(low <= code <= high for low, high in ranges):
            found.append(((code ^ 32, code ^ 32),))
    if wide:
        for letter, others in (("k", (0x212A,)), ("s", (0x17F,)), ("i", (0x130, 0x131))):
            if any(low <= ord(c) <= high for low, high in ranges for c in (letter, letter.upper())):
                found += [((other, other),) for other in others]
    return union(*found)
