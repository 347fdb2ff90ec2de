"""Keep the blocks of a session for some time after a turn, as long as its next turn can be expected; else evict by LRU.

An agent calls a tool between two turns, and comes back soon.  LRU evicts its blocks if many other requests are served
meanwhile.  Here they have a time to live, as in Continuum (arXiv:2511.02230)::

    turn ends ──► kept ──time to live is over──► loose ──► evicted, the block released longest ago first
                    └──no loose block is left──► evicted, the block whose next use is expected last first

The time to live is ``slack`` times the expected time to the next turn, and at most ``longest``.  The expected time is
``next_s`` of the client, else a moving average of the session's pauses, in which the newest pause has half of the
weight.  Without either, the blocks are loose at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import EvictorContext
from minivllm.core.interfaces.session import SessionTurn

from .leaves import LeafBlock, RankQueue
from .sessions import SessionLeaves

NEW = 0.5  # weight of the newest pause in the moving average of a session's pauses


@dataclass(slots=True)
class Pause:
    """The pause of a session between its last turn and the next one, in seconds of the engine's clock."""

    begun: float
    due: float = -math.inf  # time at which the next turn is expected; -inf if unknown
    end: float = -math.inf  # time at which the time to live of the session's blocks ends
    # moving average of the session's ended pauses, in which the newest has the weight ``NEW``; None before the first
    mean: float | None = None


class AgentTtl(SessionLeaves):
    """An evictor with two queues: blocks that are kept for a session's next turn, and loose blocks, which are evicted
    first.  It takes O(log n) per key.

    Invariant: each block of ``kept`` has an entry in ``ends`` with its time ``LeafBlock.worth``; other entries are
    skipped."""

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.pauses: dict[int, Pause] = {}  # by session
        self.kept = RankQueue()
        # a heap of (end of the time to live, unique number, block)
        self.ends: list[tuple[float, int, LeafBlock]] = []
        self.pushes = 0
        self.expired = 0  # count of blocks whose time to live ended before they were used again

    def began(self, keys: np.ndarray, turn: SessionTurn) -> None:
        pause = self.pauses.get(turn.session)
        if pause is not None:
            seconds = max(0.0, self.ctx.now() - pause.begun)
            mean = seconds if pause.mean is None else pause.mean
            pause.mean = mean + NEW * (seconds - mean)
        super().began(keys, turn)

    def ended(self, keys: np.ndarray, turn: SessionTurn) -> None:
        now, before = self.ctx.now(), self.pauses.get(turn.session)
        pause = self.pauses[turn.session] = Pause(now, mean=None if before is None else before.mean)
        seconds = turn.next_s if turn.next_s < math.inf else pause.mean
        if seconds is not None:
            pause.due = now + seconds
            pause.end = now + min(self.options.slack * seconds, self.options.longest)
        super().ended(keys, turn)

    def forgot(self, session: int) -> None:
        del self.pauses[session]

    def rank(self, block: LeafBlock) -> int:
        return 0  # all equal, so that loose blocks are evicted in the order of their release

    def enqueue(self, block: LeafBlock) -> None:
        pause = self.pauses.get(block.mark)
        if pause is None or pause.end <= self.ctx.now():
            super().enqueue(block)
            return
        entry = -pause.due
        while entry in self.kept.block_of:  # entries are unique
            entry = math.nextafter(entry, math.inf)
        self.kept.push(block, entry)
        block.worth = pause.end
        self.pushes += 1
        heapq.heappush(self.ends, (pause.end, self.pushes, block))
        if len(self.ends) > 2 * len(self.kept) + 64:
            self._compact()

    def _compact(self) -> None:
        """Remove the entries of ``ends`` whose blocks are not kept any longer."""
        kept = self.kept.block_of.values()
        self.ends = [(block.worth, number, block) for number, block in enumerate(kept)]
        heapq.heapify(self.ends)

    def unqueue(self, block: LeafBlock) -> None:
        (self.kept if self._is_kept(block) else self.queue).discard(block)

    def _is_kept(self, block: LeafBlock) -> bool:
        return block.entry is not None and self.kept.block_of.get(block.entry) is block

    def next(self) -> LeafBlock | None:
        self._expire(self.ctx.now())
        return self.queue.pop() or self.kept.pop()

    def _expire(self, now: float) -> None:
        """Move the blocks whose time to live has ended to the queue of loose blocks."""
        while self.ends and self.ends[0][0] <= now:
            end, _, block = heapq.heappop(self.ends)
            if block.worth == end and self._is_kept(block):
                self.kept.discard(block)
                self.expired += 1
                super().enqueue(block)

    def figures(self) -> Mapping[str, float]:
        """Return counters of the evictor.

        ``kept`` is the number of evictable blocks with a time to live.  ``expired`` counts the blocks since the start
        whose time to live was over before they were used again.  ``sessions`` is the number of known sessions."""
        return {"kept": len(self.kept), "expired": self.expired, "sessions": len(self.pauses)}
