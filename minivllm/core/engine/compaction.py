"""The move of a compressed row's tokens to fewer blocks of a KV group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.plan import nothing

if TYPE_CHECKING:
    from .request import Seq


@dataclass
class Compaction:
    """Compression of one row in one KV group, from ``stored`` tokens to ``kept`` tokens."""

    group: int
    slot: int
    stored: int
    kept: int
    blocks: np.ndarray  # i32 block table of the row before the compression
    used: int  # how many of ``blocks`` hold tokens; the rest is reserved for later tokens
    # bool for each of the row's first blocks, as many as the kept tokens need: True if no other row
    # and no cached prefix uses the block, so that kept tokens can be written to it
    own: np.ndarray
    # i32 blocks that the row releases when the compression is sent to the device
    retired: np.ndarray = field(default_factory=nothing())
    computed: int = 0  # number of tokens that the row has computed
    # index in ``blocks`` from which on the blocks must leave the prefix cache; equal to ``used`` if
    # none must
    unpublished: int = 0
    # the row's sequence, or None if its request does not read the kept tokens
    reader: Seq | None = None

    @property
    def lacking(self) -> int:
        """Return the number of blocks that the kept tokens need in addition to the row's own blocks."""
        return int(np.count_nonzero(~self.own))

    @property
    def to_take(self) -> int:
        """Return the number of new blocks to take from the pool: the lacking ones that are not reserved for the row
        yet."""
        return max(0, self.lacking - (len(self.blocks) - self.used))

    @property
    def gone(self) -> np.ndarray:
        """Return the blocks i32 with stored tokens that the row gives up."""
        n = len(self.own)
        shared = self.blocks[:n][~self.own]
        return np.concatenate([shared, self.blocks[n : self.used]])

    def blocks_after(self, fresh: np.ndarray) -> np.ndarray:
        """Return the row's block table i32 after the compression.

        The kept tokens move to the row's own blocks, to blocks reserved for it, and to the new blocks ``fresh`` i32.
        """
        new = self.blocks[: len(self.own)].copy()
        spare = self.blocks[self.used :]
        n = self.lacking - len(fresh)
        new[~self.own] = np.concatenate([spare[:n], fresh])
        return np.concatenate([new, spare[n:]])

    @property
    def row(self) -> tuple[int, int, int, int, int]:
        """Return the row of ``plan.Delta.compact``."""
        return self.group, self.slot, self.stored, self.kept, self.computed

    @property
    def sources(self) -> np.ndarray:
        """Return the blocks i32 that hold the stored tokens."""
        return self.blocks[: self.used]
