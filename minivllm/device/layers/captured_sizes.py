"""Sizes of steps that are captured: rows and tokens are padded to the next one.

decode   one token a row: every size is captured at the start
mixed    some rows bring several tokens: a few at the start, which serve smaller steps, others when they come often
"""

from __future__ import annotations

MOST_TOKENS = 2048  # of a captured mixed step: larger ones are bound by the device either way
# of the mixed steps that are captured at the start
FIRST_TOKENS, FIRST_ROWS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048), (16, 128, 512)


def row_sizes(most: int) -> list[int]:
    """Captured batch sizes up to ``most``: close together where a padded row costs the most, relatively."""
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
    """Rows of captured mixed steps: few, because a padded row costs little there."""
    return sorted({n for n in (16, 32, 64, 128, 192, 256, 384, 512, 768) if n < most} | {min(most, 1024)})


def token_size(tokens: int) -> int:
    """Tokens of a captured mixed step: from 256 on at most a quarter is padding, from 1,024 on an eighth."""
    unit = 64 if tokens <= 512 else 128
    return -(-tokens // unit) * unit


def first_mixed(coarse: list[int], most: int) -> list[tuple[int, int]]:
    """(rows, tokens) of the mixed steps that are captured at the start, most tokens first, of steps with up to ``most``
    tokens: any other may run in one of them (``device/worker/graphs.py``).  ``coarse``: sizes of rows."""
    most = token_size(min(most, MOST_TOKENS))
    tokens = [*(n for n in FIRST_TOKENS if n < most), most]
    rows = [*(n for n in coarse[:-1] if n in FIRST_ROWS), coarse[-1]]
    sizes = {(max(t, r), r) for r in rows for t in tokens}
    return [(r, t) for t, r in sorted(sizes, reverse=True)]


def useful_sizes(ms: dict[int, float]) -> list[int]:
    """The sizes that no larger one beats: the library's products have sizes that take a third longer than the next."""
    keep: list[int] = []
    for size in sorted(ms, reverse=True):
        if not keep or ms[size] <= min(ms[k] for k in keep):
            keep.insert(0, size)
    return keep
