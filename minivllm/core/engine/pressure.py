"""Compression under memory pressure: rows are compressed before a row would be preempted for their blocks.

    blocks    free 3 │ the running rows need 5 more within the next steps
    choose    the row whose compression frees the most blocks; it computes no further token
    compress  once its last step was collected; the blocks are free for the next step

A compression takes some steps, so rows are chosen before the blocks are used up.  If blocks are short all the same, a
row is preempted as without this module.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .slots import NEVER

if TYPE_CHECKING:
    from .cache import KVCache
    from .request import Request, Seq
    from .slots import Slots


class Pressure:
    """Chooses rows to compress under memory pressure.

    ``budget`` is a number of tokens, or below 1 a share of a row's computed tokens.  ``depth`` is the number of steps
    in flight besides the newest one.  ``observes`` means that the compressor reads queries.
    """

    def __init__(self, budget: float, depth: int, observes: bool) -> None:
        self.budget = budget
        self.delay = int(observes)
        # Number of steps between the decision to compress a row and the first step in which another
        # row can use its freed blocks.
        self.horizon = depth + 3 + self.delay

    def tokens_to_keep(self, request: Request, computed: int) -> int:
        """Return the number of tokens that a row with ``computed`` tokens keeps in the KV cache when it is compressed
        under memory pressure."""
        budget = request.pressure
        return math.ceil(budget * computed) if budget < 1 else int(budget)

    def choose(self, s: Slots, cache: KVCache) -> None:
        """Choose rows to compress if the running rows will soon need more blocks than are available.

        A chosen row is compressed at its present number of tokens, or after one more token if the compressor reads
        queries."""
        rows = s.running
        upto = np.minimum(s.computed[rows] + self.horizon, s.end[rows])
        lacking = cache.missing(rows, upto).sum(axis=1)
        short = lacking - np.array([pool.available for pool in cache.pools])
        if short.max(initial=0) <= 0:
            return
        waits = s.compress_at[rows] <= s.computed[rows] + 1
        for slot in rows[waits].tolist():
            short = short - self._freed(s, cache, slot)
        can = ~waits & ~s.forking[rows] & (s.computed[rows] >= s.prompt[rows])
        can &= (s.known[rows] - s.computed[rows] <= 1) & (s.end[rows] - s.computed[rows] > 3)
        freed = [(self._freed(s, cache, slot), slot) for slot in rows[can].tolist()]
        freed = [(blocks, slot) for blocks, slot in freed if blocks.max() > 0]
        # The row that frees the most blocks is last; among equal rows the newest is last.
        freed.sort(key=lambda found: (int(found[0].sum()), int(s.id[found[1]])))
        while freed and short.max() > 0:
            blocks, slot = freed.pop()
            s.compress_at[slot] = s.computed[slot] + self.delay
            s.changes += 1
            short = short - blocks

    def _freed(self, s: Slots, cache: KVCache, slot: int) -> np.ndarray:
        """Return the number of blocks i64 [G] of each KV group that become free if a row is compressed under memory
        pressure; zeros if it cannot be compressed."""
        freed = np.zeros(len(cache.pools), np.int64)
        request = s.at(slot).request
        if not request.pressure:
            return freed
        keep = self.tokens_to_keep(request, int(s.computed[slot]))
        for one in cache.to_compact(slot, keep, private=True):
            freed[one.group] = cache.freed_by(one)
        return freed


def next_recorded(seq: Seq, computed: int) -> int:
    """Return at which number of computed tokens, above ``computed``, a sequence is compressed next according to its
    record of earlier compressions; NEVER if there is none.  The record is repeated after a preemption."""
    return min((at for at in seq.compressions if at > computed), default=NEVER)
