"""KV compression on the host: which rows are compressed, when, and to how many tokens.

    prompt P = 10, kv_budget = 4, compress_every = 3

    computed     0 ........ 10 │ 11 12 13 │ 14 15 16 │          the row is compressed at 10, 13, 16 ...
    stored       0 ........ 10 │  5  6  7 │  5  6  7 │          tokens in the KV cache
                          4 ◄──┘    4 ◄───┘    4 ◄───┘

A compression happens between two steps, at a number of computed tokens that depends on the request alone.  So a row
that was preempted is compressed at the same places when its tokens are computed again.  The device chooses the tokens
(``interfaces.compressor``); their number is known here.  The row waits until its earlier steps have been collected, so
that the blocks of its prompt are published before their content moves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.errors import ConfigError, RequestError

from .slots import NEVER

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Capacity, Executor, Wiring

    from .cache import KVCache
    from .compaction import Compaction
    from .request import Request
    from .slots import Slots

BUDGET = "kv_budget"  # parameter of a request


class CompressingPlanner(Protocol):
    """The attributes of a planner that a compression uses."""

    slots: Slots
    cache: KVCache

    def make_room(self, requester: int, need: int) -> int: ...


class Compression:
    """The compressions of an engine.

    ``budget`` is that of requests without one, 0 for none.  ``every`` is the number of generated tokens between two
    compressions, 0 for one at the end of the prompt.  ``observed`` is the number of last tokens whose queries the
    compressor reads."""

    def __init__(self, budget: float, every: int, observed: int, shares: bool) -> None:
        self.budget, self.every, self.observed, self.shares = budget, every, observed, shares
        self.compressions = self.dropped = 0

    @classmethod
    def of(
        cls, wiring: Wiring, capacity: Capacity, executor: Executor, cache: KVCache
    ) -> Compression | None:
        """Return the compressions of a wiring, and set ``cache.compacts``; None without a compressor.  ConfigError if
        the executor does not implement them."""
        part = wiring.compressor
        if part is None:
            return None
        if capacity.compresses is None:
            who = type(executor).__name__
            raise ConfigError(
                f"compressor={part.name.removeprefix('minivllm/')}: the executor {who} compresses no rows; use local, "
                "process, multiprocess, ray or sim, or compressor=none"
            )
        cache.compacts = True
        return cls(
            wiring.cache.kv_budget, wiring.cache.compress_every, capacity.compresses, cache.prefix
        )

    def bind(self, request: Request) -> None:
        """Set the number of tokens that a request keeps.  RequestError if its budget is not a number of tokens or a
        share of its prompt."""
        budget = request.params.extra.get(BUDGET)
        if budget is None:
            budget = self.budget
        if not budget or request.pooling is not None:
            return
        if not math.isfinite(budget) or (budget >= 1 and budget != int(budget)):
            expected = "a whole number of tokens, or a share of the prompt below 1"
            raise RequestError(f"{BUDGET}={budget}: expected {expected}", BUDGET)
        n = len(request.prompt)
        keep = math.ceil(budget * n) if budget < 1 else int(budget)
        request.keep = keep
        request.first_compression = n
        if n <= keep and self.every:
            # the first multiple at which more than ``keep`` tokens are stored
            request.first_compression = n + self.every * -(-(keep + 1 - n) // self.every)
        request.observed = min(self.observed, n) if n > keep else 0

    def settle(self, request: Request) -> None:
        """Leave a request uncompressed if it ends before its first compression removes a token."""
        n, keep = len(request.prompt), request.keep
        last = request.end - 1  # the last token is drawn and not computed
        if keep and (request.first_compression > last or (n <= keep and not self.every)):
            request.keep = request.observed = 0

    def hold(self, request: Request, end: int, block: int) -> int:
        """Return the most tokens that the KV cache holds for a row of a request that ends at ``end`` tokens.

        The kept tokens move to other blocks where those of the prompt may be cached prefixes, or are shared by the
        branches of the request."""
        n, keep = len(request.prompt), request.keep
        if not keep or request.first_compression >= end:
            return end
        grown = min(self.every, end - n) if self.every else end - n
        before = max(n, min(end, keep + self.every)) if self.every else n
        after = keep + grown + block
        if not self.shares and request.params.width == 1:
            return max(before, after)
        return -(-before // block) * block + after

    def check(self, request: Request, guided: bool) -> None:
        """Raise RequestError if the rows of a request cannot be compressed."""
        if not request.keep:
            return
        if request.beams is not None:
            raise RequestError(
                f"{BUDGET}: a beam search is not compressed; leave out one of the two, or set {BUDGET}=0",
                BUDGET,
            )
        if guided:
            raise RequestError(
                f"{BUDGET}: a row with a guide is not compressed; leave out one of the two, or set {BUDGET}=0",
                BUDGET,
            )

    def plan(self, planner: CompressingPlanner) -> None:
        """Compress the rows that have computed their tokens up to the next compression, if they get the blocks."""
        s = planner.slots
        due = s.running[s.computed[s.running] >= s.compress_at[s.running]]
        for slot in due.tolist():
            seq = s.seq[slot]
            if seq is None or s.step[slot] > s.published:
                continue  # it was preempted for another row, or its blocks are not published yet
            compactions = planner.cache.to_compact(slot, seq.request.keep)
            if not self._has_room(planner, slot, compactions):
                continue
            planner.cache.compact(compactions)
            self.compressions += bool(compactions)
            self.dropped += max((one.stored - one.kept for one in compactions), default=0)
            s.compress_at[slot] = s.computed[slot] + self.every if self.every else NEVER
            s.changes += 1

    def observe(
        self, s: Slots, slots: np.ndarray, computed: np.ndarray, q_len: np.ndarray
    ) -> dict[str, Any]:
        """Return the column ``observe`` of a plan: the rows whose queries the next compression reads.

        It reads the last queries of the prompt at first, and later the last query only.  ``computed`` i32 [R] are the
        numbers of tokens that the rows had before the step, and ``q_len`` i32 [R] the numbers of tokens in the step.
        """
        if not self.observed:
            return {}
        end = s.compress_at[slots]
        first = end - np.where(
            end == s.prompt[slots], np.minimum(self.observed, s.prompt[slots]), 1
        )
        after = computed + q_len
        rows = np.flatnonzero((after > first) & (after <= end))
        if not len(rows):
            return {}
        before = computed[rows] > first[rows]
        count = np.where(before, q_len[rows], after[rows] - first[rows])
        return {"observe": np.stack([rows, count, before], axis=1).astype(np.int32)}

    def _has_room(
        self, planner: CompressingPlanner, slot: int, compactions: list[Compaction]
    ) -> bool:
        """Return True if the blocks that a compression takes are available.  The oldest row preempts others for
        them."""
        s, cache = planner.slots, planner.cache
        need = np.zeros((len(cache.pools), 1), np.int32)
        for one in compactions:
            need[one.group] = one.to_take
        while not cache.can_take(need):
            if (
                s.id[slot] != s.id[s.running].min()
                or planner.make_room(slot, int(need.sum())) == slot
            ):
                return False
        return True

    def stats(self) -> dict[str, Any]:
        """Return the number of compressions, and of the tokens that they removed from each layer."""
        return {"compressions": self.compressions, "dropped_tokens": self.dropped}
