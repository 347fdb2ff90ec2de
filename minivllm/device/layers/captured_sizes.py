"""Sizes of captured steps (CUDA graphs).  A step is padded to the next larger number of rows and tokens.

decode   one token for each row.  Steps with shared prefixes have few sizes, those in which they can save enough.
mixed    some rows have several tokens.  A few sizes are captured ahead, and smaller steps are padded to them.  Other
         sizes are captured when they have become frequent.

A few of these sizes are captured before the engine is ready, and the others while it serves.
"""

from __future__ import annotations

MOST_TOKENS = 8192  # largest number of tokens of a captured mixed step, which bounds the memory of captures
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
READY_ROWS = (1, 8)
READY_TOKENS = 512


def row_sizes(most: int) -> list[int]:
    """Return the numbers of rows for which decode steps are captured, ascending; the last is ``most``, but at most
    1024.

    Small sizes are close together, because a padded row costs relatively most there."""
    steps = [
        1,
        2,
        4,
        *range(8, 64, 8),
        *range(64, 256, 16),
        *range(256, 512, 32),
        *range(512, 1025, 64),
    ]
    return sorted({n for n in steps if n < most} | {min(most, 1024)})


def coarse_sizes(most: int) -> list[int]:
    """Return the numbers of rows for which mixed steps are captured, ascending; the last is ``most``, but at most 1024.

    They are few, because a padded row costs little in a mixed step."""
    sizes = {n for n in (16, 32, 64, 128, 192, 256, 384, 512, 768) if n < most}
    return sorted(sizes | {min(most, 1024)})


def shared_sizes(most: int) -> list[int]:
    """Return the numbers of rows of captured decode steps that read shared prefixes once, ascending.

    They are few, because such steps are rarer."""
    sizes = {n for n in (16, 32, 64, 128, 256, 384, 512, 768) if n < most}
    return sorted(sizes | {min(most, 1024)})


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
    return -(-tokens // unit) * unit


def first_mixed(coarse: list[int], most: int) -> list[tuple[int, int]]:
    """Return (rows, tokens) of the mixed steps that are captured at the start, most tokens first.

    ``most`` is the largest number of tokens of a captured step, and ``coarse`` the result of ``coarse_sizes``.  Any
    smaller mixed step can be padded to one of these sizes (``device/worker/graphs.py``).
    """
    most = token_size(min(most, MOST_TOKENS))
    rows = [n for n in coarse[:-1] if n in FIRST_ROWS]
    rows.append(coarse[-1])
    long_rows = next((n for n in rows if n >= LONG_ROWS), rows[-1])
    sizes = {(max(t, r), r) for t in FIRST_TOKENS if t < most for r in rows}
    sizes |= {(t, long_rows) for t in LONG_TOKENS if t < most}
    sizes |= {(t, rows[-1]) for t in MANY_ROWS_TOKENS if t < most}
    of_largest = rows if most <= FIRST_TOKENS[-1] else [long_rows, rows[-1]]
    sizes |= {(max(most, r), r) for r in of_largest}
    return [(r, t) for t, r in sorted(sizes, reverse=True)]


def useful_sizes(ms: dict[int, float]) -> list[int]:
    """Return the sizes, ascending, for which no larger size takes less time; ``ms`` maps a size to its milliseconds.

    Some sizes take a third longer than the next larger size in the GPU's matrix library."""
    keep: list[int] = []
    for size in sorted(ms, reverse=True):
        if not keep or ms[size] <= min(ms[k] for k in keep):
            keep.insert(0, size)
    return keep


def long_decode(sizes: list[int]) -> list[int]:
    """Return the numbers of rows for which decode steps of long contexts are captured ahead, descending.

    ``sizes`` are all sizes, ascending.  Steps of other sizes run in the next larger capture until they are frequent."""
    return sorted({n for n in sizes if n in LONG_CONTEXT_ROWS} | {sizes[-1]}, reverse=True)


def first_decode(sizes: list[int]) -> set[int]:
    """Return the sizes of decode steps that are captured before the engine is ready.

    ``sizes`` are all sizes, ascending.  The largest is one of them, so every decode step fits a capture."""
    return {n for n in sizes if n in READY_ROWS} | {sizes[-1]}


def is_first_mixed(size: tuple[int, int], sizes: list[tuple[int, int]]) -> bool:
    """Return whether a mixed step of (rows, tokens) is captured before the engine is ready.

    ``sizes`` are the results of ``first_mixed``.  The smallest and the largest are captured, and for the fewest and the
    most rows one of READY_TOKENS tokens."""
    rows, tokens = size
    few = min(r for r, _ in sizes)
    most = max(r for r, _ in sizes)
    by_tokens = sorted(sizes, key=lambda one: one[::-1])
    ends = by_tokens[0], by_tokens[-1]
    return size in ends or (rows in (few, most) and tokens == READY_TOKENS)
