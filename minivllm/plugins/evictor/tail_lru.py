"""Evict the ends of sessions first whose next request is in time without them, else the block released longest ago.

Tail-optimised LRU is from "Tail-Optimized Caching for LLM Inference" (NeurIPS 2025, arXiv:2510.15152).  The first token
of a request is late if more than ``budget`` tokens have to be computed before it.  A session of n tokens whose next
request adds q tokens is in time as long as n + q - budget tokens are cached.  Blocks behind them can be evicted without
making a request late.

The client sends ``budget`` with the session, or it is an option; with 0 no block is safe to evict, and the order is
that of ``lru``.  Each turn of a session replaces the facts of its blocks.
"""

from __future__ import annotations

from .leaves import LeafBlock
from .sessions import SessionLeaves


class TailLru(SessionLeaves):
    """An evictor that evicts blocks first whose loss makes no request of their session late, O(log n) per key."""

    def rank(self, block: LeafBlock) -> int:
        turn = self.turn_of(block)
        if turn is None:
            return 1
        budget = self.options.budget if turn.budget < 0 else turn.budget
        needed = turn.tokens + self.options.prompt - budget
        return 0 if block.depth * self.ctx.block >= needed else 1
