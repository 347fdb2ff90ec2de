"""Sizes of captured steps (CUDA graphs).  A step is padded to the next larger number of rows and tokens.

decode   one token for each row.  Steps with shared prefixes have few sizes, those in which they can save enough.
mixed    some rows have several tokens.  A few sizes are captured ahead, and smaller steps are padded to them.  Other
         sizes are captured when they have become frequent.

A few of these sizes are captured before the engine is ready, and the others while it serves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

RowsTokens = tuple[int, int]  # (rows, tokens) of a step
MOST_TOKENS = 8192  # largest number of tokens of a captured mixed step, which bounds the memory of captures
WHOLE_TOKENS = 1024  # mixed steps of at least this many tokens are captured only for contexts of any length
# numbers of tokens and of rows of the mixed steps that are captured before such a step has occurred
FIRST_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
FIRST_ROWS = (16, 128, 512)
# Longer steps have fewer captures.  A padded row costs little in them, so they have at least LONG_ROWS rows, and with
# the most rows only the sizes MANY_ROWS_TOKENS.
LONG_TOKENS = (2560, 3072, 4096, 5120, 6144, 8192)
LONG_ROWS = 128
MANY_ROWS_TOKENS = (4096, 8192)

# numbers of rows of decode steps that are captured for long contexts before such a step has occurred
LONG_CONTEXT_ROWS = (8, 64, 256)

# numbers of rows of decode steps, and of tokens of mixed steps, that are captured before the engine is ready
READY_ROWS = (1, 8, 64, 256)
READY_TOKENS = 512


def row_sizes(most: int) -> list[int]:
    """Return the numbers of rows for which decode steps are captured, ascending; the last is ``most``, but at most
    1024.

    Small sizes are close together, because a padded row costs relatively most there."""
    sizes = [
        1,
        2,
        4,
        *range(8, 64, 8),
        *range(64, 256, 16),
        *range(256, 512, 32),
        *range(512, 1025, 64),
    ]
    return _up_to(most, sizes)


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    """Return the sizes below ``most``, and ``most`` itself but at most 1024, ascending."""
    smaller = {n for n in sizes if n < most}
    last = min(most, 1024)
    return sorted({*smaller, last})


def coarse_sizes(most: int) -> list[int]:
    """Return the numbers of rows for which mixed steps are captured, ascending; the last is ``most``, but at most 1024.

    They are few, because a padded row costs little in a mixed step."""
    sizes = (16, 32, 64, 128, 192, 256, 384, 512, 768)
    return _up_to(most, sizes)


def shared_sizes(most: int) -> list[int]:
    """Return the numbers of rows of captured decode steps that read shared prefixes once, ascending.

    They are few, because such steps are rarer."""
    sizes = (16, 32, 64, 128, 256, 384, 512, 768)
    return _up_to(most, sizes)


def token_size(tokens: int) -> int:
    """Round a number of tokens up to a size for which mixed steps may be captured.

    The sizes are multiples of 64 up to 512, of 128 up to 2,048, of 256 up to 4,096 and then of 512.  So from 256 tokens
    on at most a quarter of a step is padding, from 1,024 on at most an eighth."""
    if tokens <= 512:
        unit = 64
    elif tokens <= 2048:
        unit = 128
    else:
        unit = 256 if tokens <= 4096 else 512
    units = -(-tokens // unit)
    return units * unit


def first_mixed(coarse: list[int], most: int) -> list[RowsTokens]:
    """Return (rows, tokens) of the mixed steps that are captured at the start, most tokens first.

    ``most`` is the largest number of tokens of a captured step, and ``coarse`` the result of ``coarse_sizes``.  Any
    smaller mixed step can be padded to one of these sizes (``device/worker/graphs.py``).
    """
    most = token_size(min(most, MOST_TOKENS))
    most_rows = coarse[-1]
    rows = [n for n in coarse[:-1] if n in FIRST_ROWS]
    rows.append(most_rows)
    wide = [n for n in rows if n >= LONG_ROWS]
    long_rows = wide[0] if wide else most_rows
    sizes = [*itertools.product(FIRST_TOKENS, rows)]
    sizes += itertools.product(LONG_TOKENS, [long_rows])
    sizes += itertools.product(MANY_ROWS_TOKENS, [most_rows])
    sizes = [(t, r) for t, r in sizes if t < most]
    of_largest = rows if most <= FIRST_TOKENS[-1] else [long_rows, most_rows]
    sizes += itertools.product([most], of_largest)
    by_tokens = {(max(t, r), r) for t, r in sizes}
    return [(r, t) for t, r in sorted(by_tokens, reverse=True)]


def first_imaged(mixed: list[RowsTokens], most: int) -> list[RowsTokens]:
    """Return (rows, tokens) of the mixed steps with images that are captured at the start, most tokens first.

    ``mixed`` is the result of ``first_mixed``, and ``most`` the largest number of tokens of a captured step with
    images.  All steps except the smallest and the largest have the same number of rows, at least LONG_ROWS if possible:
    an image has hundreds of tokens, so a padded row costs little.
    """
    fitting = [one for one in mixed if one[1] <= most]
    if not fitting:
        return []
    all_rows = {r for r, _ in fitting}
    wide = [r for r in all_rows if r >= LONG_ROWS]
    rows = min(wide) if wide else max(all_rows)
    ends = fitting[0], fitting[-1]
    return [one for one in fitting if one[0] == rows or one in ends]


def useful_sizes(ms: dict[int, float]) -> list[int]:
    """Return the sizes, ascending, for which no larger size takes less time; ``ms`` maps a size to its milliseconds.

    Some sizes take a third longer than the next larger size in the GPU's matrix library."""
    keep: list[int] = []
    fastest = math.inf  # milliseconds of the fastest larger size
    for size in sorted(ms, reverse=True):
        if ms[size] <= fastest:
            fastest = ms[size]
            keep.insert(0, size)
    return keep


def long_decode(sizes: list[int]) -> list[int]:
    """Return the numbers of rows for which decode steps of long contexts are captured ahead, descending.

    ``sizes`` are all sizes, ascending.  Steps of other sizes run in the next larger capture until they are frequent."""
    ahead = {n for n in sizes if n in LONG_CONTEXT_ROWS}
    ahead.add(sizes[-1])
    return sorted(ahead, reverse=True)


def first_decode(sizes: list[int]) -> set[int]:
    """Return the sizes of decode steps that are captured before the engine is ready.

    ``sizes`` are all sizes, ascending.  The largest is one of them, so every decode step fits a capture."""
    ready = {n for n in sizes if n in READY_ROWS}
    ready.add(sizes[-1])
    return ready


def is_first_mixed(size: RowsTokens, sizes: list[RowsTokens]) -> bool:
    """Return whether a mixed step of (rows, tokens) is captured before the engine is ready.

    ``sizes`` are the results of ``first_mixed``.  The smallest and the largest are captured, and for the fewest and the
    most rows one of READY_TOKENS tokens."""
    by_tokens = sorted(sizes, key=lambda one: one[::-1])
    if size in (by_tokens[0], by_tokens[-1]):
        return True
    rows, tokens = size
    all_rows = [r for r, _ in sizes]
    ends = min(all_rows), max(all_rows)
    return rows in ends and tokens == READY_TOKENS
