"""The decision whether the partly filled last blocks of ended sequences (tails) are worth their place in the cache."""

from __future__ import annotations

LEARNED = 64  # number of kept tails after which their use is judged
LEAST = 1 / 16  # least number of uses per tail with which a full cache keeps tails
TRIED = 16  # in a full cache one of this many tails is kept anyway, to detect a new use
WINDOW = 1024  # number of tails after which the counts are halved, so that later tails count more


class TailUse:
    """Counts the use of tails.

    A tail takes a whole block.  In a full cache another block is evicted for it, which costs hits if no later prompt
    begins with the text of the tail, as in traces of independent requests.
    """

    def __init__(self) -> None:
        self.kept = self.used = 0.0
        self.skipped = 0

    def pays(self, full: bool) -> bool:
        """Return True if the next tail should be cached.  ``full`` means that the cache has no free block."""
        worth = self.kept < LEARNED or self.used >= LEAST * self.kept
        if worth or not full:
            return True
        self.skipped += 1
        return self.skipped % TRIED == 0

    def cached(self) -> None:
        """Count a tail that was cached."""
        self.kept += 1
        if self.kept >= WINDOW:
            self.kept /= 2
            self.used /= 2

    def copied(self) -> None:
        """Count a prompt that continues a tail."""
        self.used += 1
