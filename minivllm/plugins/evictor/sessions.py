"""The common code of evictors that use facts about sessions."""

from __future__ import annotations

from typing import Any

import numpy as np

from minivllm.core.interfaces.evictor import BlockInfo, EvictorContext
from minivllm.core.interfaces.session import SessionTurn

from .leaves import LeafBlock, Leaves

LEAST = 64  # the last turns of at least this many sessions are stored, also for small caches


class SessionLeaves(Leaves):
    """Base class of evictors that store the last turn of recent sessions.

    ``LeafBlock.mark`` is the number of the session that used the block last, 0 for none."""

    def __init__(self, options: Any, ctx: EvictorContext) -> None:
        super().__init__(options, ctx)
        self.turns: dict[int, SessionTurn] = {}  # session -> its last turn, in the order in which the turns ended

    def add(self, keys: np.ndarray, info: BlockInfo) -> None:
        super().add(keys, info)
        for key, session in zip(keys.tolist(), info.session.tolist(), strict=True):
            self.blocks[key].mark = session

    def began(self, keys: np.ndarray, turn: SessionTurn) -> None:
        self.assign(keys, turn.session)

    def ended(self, keys: np.ndarray, turn: SessionTurn) -> None:
        self.turns.pop(turn.session, None)
        self.turns[turn.session] = turn
        if len(self.turns) > max(LEAST, self.ctx.capacity):
            self.forgot(self.turns.pop(next(iter(self.turns))).session)
        self.assign(keys, turn.session)

    def assign(self, keys: np.ndarray, session: int) -> None:
        """Record that blocks belong to a session now, and rank the evictable (ripe) blocks among them again."""
        for key in keys.tolist():
            block = self.blocks[key]
            block.mark = session
            if not block.held and not block.children:
                self.unqueue(block)
                self.enqueue(block)

    def forgot(self, session: int) -> None:
        """Update the data of a subclass after the last turn of a session was dropped.  This class has none."""

    def turn_of(self, block: LeafBlock) -> SessionTurn | None:
        """Return the last turn of the session that used a block last; None if there is none."""
        return self.turns.get(block.mark)
