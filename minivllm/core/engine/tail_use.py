"""The decision whether the partly filled last blocks (tails) of ended sequences are kept in the prefix cache."""

from __future__ import annotations

# A tail is the partly filled last block of a sequence that has ended.
LEARNED = 64  # count of cached tails from which on a full cache judges whether tails are used
LEAST = 1 / 16  # a full cache keeps tails if each one is used at least so often on average
# A full cache keeps one in this many tails even if tails are rarely used, to detect a change.
TRIED = 16
WINDOW = 1024  # the counts are halved after this many cached tails, so that newer tails count more


class TailUse:
    """Counts how often tails (partly filled last blocks of ended sequences) are used.

    A tail takes a whole block.  In a full cache another block is evicted for it, which costs prefix hits if no later
    prompt begins with the text of the tail, as in traces of independent requests."""

    def __init__(self) -> None:
        self.kept = self.used = 0.0
        self.skipped = 0

    def pays(self, full: bool) -> bool:
        """Return True if the next tail (partly filled last block of a sequence that ends) should be cached.

        ``full`` means that the cache has no free block.  Otherwise every tail is cached."""
        worth = self.kept < LEARNED or self.used >= LEAST * self.kept
        if worth or not full:
            return True
        self.skipped += 1
        return self.skipped % TRIED == 0

    def cached(self) -> None:
        """Count a tail (partly filled last block of an ended sequence) that enters the prefix cache."""
        self.kept += 1
        if self.kept >= WINDOW:
            self.kept /= 2
            self.used /= 2

    def copied(self) -> None:
        """Count a prompt that copies a cached tail (partly filled last block of an ended sequence)."""
        self.used += 1
