"""Represent sets of code points as sorted ranges that do not touch, with the named sets of regular expressions."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import chain, groupby

Ranges = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
# BLOCKS: ranges of code points of one category each (in the first range none is assigned); SPANS: all other code points
BLOCKS = ((0x40000, 0xDFFFF), (0xE1000, 0xEFFFF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
SPANS = ((0, 0x3FFFF), (0xE0000, 0xE0FFF), (0xFFFFE, 0xFFFFF), (0x10FFFE, LAST))
# characters outside ASCII that equal the letter if case is ignored
FOLDED = {"k": (0x212A,), "s": (0x17F,), "i": (0x130, 0x131)}
ECMA_SPACE: Ranges = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
PYTHON_SPACE: Ranges = ((0x1C, 0x1F), (0x85, 0x85))  # characters that match ``\\s`` in Python and not in ECMA-262
LONG = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Symbol": "S", "Math_Symbol": "Sm",
    "Currency_Symbol": "Sc", "Separator": "Z", "Space_Separator": "Zs", "Control": "Cc",
}  # fmt: skip
KINDS = {"L": "ultmo", "M": "nce", "N": "dlo", "P": "cdseifo", "S": "mcko", "Z": "slp", "C": "cfon"}
CATEGORIES = {kind + more for kind, inner in KINDS.items() for more in ("", *inner)}


def union(*sets: Ranges) -> Ranges:
    """Return the union of some sets."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(chain(*sets)):
        if not made:
            made.append((low, high))
            continue
        begin, end = made[-1]
        if low <= end + 1:
            made[-1] = (begin, max(end, high))
        else:
            made.append((low, high))
    return tuple(made)


def complement(ranges: Ranges) -> Ranges:
    """Return all code points outside a set."""
    made = []
    at = 0
    for low, high in union(ranges):
        if at < low:
            made.append((at, low - 1))
        at = high + 1
    if at <= LAST:
        made.append((at, LAST))
    return tuple(made)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Return the code points that are in both sets."""
    made = []
    for a, b in one:
        for c, d in other:
            if a <= d and c <= b:
                made.append((max(a, c), min(b, d)))
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
    if name not in CATEGORIES:
        return None
    categories, _ = tables()
    return categories.get(name, ())


@cache
def tables() -> tuple[dict[str, Ranges], Ranges]:
    r"""Return the general categories, and the code points of ``\\w`` in Python's ``re``.

    All sets are computed together, before the first grammar is compiled.  If they were computed at their first use, the
    time of a request would reveal whether an earlier request had used a set.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    word = []
    for low, high in BLOCKS:
        found.setdefault(_category_of(low), []).append((low, high))
    for low, high in SPANS:
        codes = range(low, high + 1)
        for name, run in groupby(codes, _category_of):
            found.setdefault(name, []).append(_ends(run))
        for is_word, run in groupby(codes, _is_word):
            if is_word:
                word.append(_ends(run))
    made = {name: union(tuple(ranges)) for name, ranges in found.items()}
    kinds = {}
    for kind in KINDS:
        kinds[kind] = union(*(ranges for name, ranges in made.items() if name[0] == kind))
    return made | kinds, union(tuple(word))


def _category_of(code: int) -> str:
    return unicodedata.category(chr(code))


def _is_word(code: int) -> bool:
    return code == 95 or chr(code).isalnum()


def _ends(run: Iterator[int]) -> tuple[int, int]:
    """Return the first and the last number of a run."""
    elements = list(run)
    return elements[0], elements[-1]


def folded(ranges: Ranges, wide: bool) -> Ranges:
    """Return a set with the other case of its ASCII letters, and with ``wide`` also all characters that fold to a
    letter.
    """
    found = [ranges]
    for code in (*range(65, 91), *range(97, 123)):
        if _contains(ranges, code):
            other = code ^ 32
            found.append(((other, other),))
    if wide:
        for letter, others in FOLDED.items():
            if _contains(ranges, ord(letter)) or _contains(ranges, ord(letter.upper())):
                found += [((other, other),) for other in others]
    return union(*found)


def _contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)
