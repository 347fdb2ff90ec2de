"""KV compression on the host: which rows are compressed, when, and to how many tokens.

    prompt P = 10, kv_budget = 4, compress_every = 3

    computed     0 ........ 10 │ 11 12 13 │ 14 15 16 │          the row is compressed at 10, 13, 16 ...
    stored       0 ........ 10 │  5  6  7 │  5  6  7 │          tokens in the KV cache
                          4 ◄──┘    4 ◄───┘    4 ◄───┘

A compression happens between two steps, at a number of computed tokens that depends only on the request.  So a row
that was preempted is compressed at the same places when its tokens are computed again.  The device chooses the tokens
(``interfaces.compressor``); their number is known here.  A compression is planned while earlier steps of its row are in
flight.  Only a row whose blocks may still be published, or whose branches have not forked, waits until these steps have
been collected, because the content of its blocks moves.

Memory pressure adds compressions at other places (``pressure``).  ``Seq.compressions`` therefore lists all compressions
of a sequence, and they are repeated at the same places after a preemption.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.errors import ConfigError, RequestError

from .pressure import Pressure, next_recorded
from .slots import NEVER

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Capacity, Executor, Wiring

    from .cache import KVCache
    from .compaction import Compaction
    from .request import Request, Seq
    from .slots import Slots

# request parameter: the number of tokens to keep in the KV cache, or below 1 the share of the prompt
BUDGET = "kv_budget"


class CompressingPlanner(Protocol):
    """The attributes of a planner that a compression uses."""

    slots: Slots
    cache: KVCache

    def make_room(self, requester: int, need: int) -> int: ...


class Compression:
    """The compressions of KV caches in an engine.

    ``budget`` is the number of kept tokens (or the share of the prompt, below 1) of requests without ``kv_budget``; 0
    means no compression.  ``every`` is the number of generated tokens between two compressions, 0 for a single one at
    the end of the prompt.  ``observed`` is the number of last tokens whose queries the compressor plug-in reads, and
    ``sums`` means that it reads attention sums over the prompt."""

    def __init__(
        self,
        budget: float,
        every: int,
        observed: int,
        sums: bool,
        shares: bool,
        pressure: Pressure | None,
    ) -> None:
        self.budget = budget
        self.every = every
        self.observed = observed
        self.shares = shares
        self.sums = sums
        self.pressure = pressure
        self.compressions = self.dropped = 0

    @classmethod
    def of(
        cls, wiring: Wiring, capacity: Capacity, executor: Executor, cache: KVCache
    ) -> Compression | None:
        """Return the compressions that the configuration ``wiring`` selects, and set ``cache.compacts``; None without a
        compressor.  ConfigError if the executor does not implement compressions."""
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
        options = wiring.cache
        observed = capacity.compresses
        pressure = None
        if options.pressure_budget:
            pressure = Pressure(options.pressure_budget, capacity.depth, observed > 0)
            cache.margin = 1 + pressure.horizon // wiring.block
        every = options.compress_every
        sums = capacity.sums
        return cls(options.kv_budget, every, observed, sums, cache.prefix, pressure)

    def bind(self, request: Request) -> None:
        """Set how many tokens a request keeps in the KV cache, and when it is first compressed.  RequestError if its
        ``kv_budget`` is neither a whole number of tokens nor a share of its prompt."""
        requested = request.params.extra.get(BUDGET)
        budget = self.budget if requested is None else requested
        if self.pressure is not None and requested != 0 and request.pooling is None:
            request.pressure = self.pressure.budget
            request.observed = len(request.prompt) if self.sums else 0
        if not budget or request.pooling is not None:
            return
        if not math.isfinite(budget) or (budget >= 1 and budget != int(budget)):
            expected = "a whole number of tokens, or a share of the prompt below 1"
            raise RequestError(f"{BUDGET}={budget}: expected {expected}", BUDGET)
        n = len(request.prompt)
        keep = math.ceil(budget * n) if budget < 1 else int(budget)
        request.keep = keep
        if request.pressure:
            request.pressure = keep
        request.first_compression = n
        if n <= keep and self.every:
            # the first multiple of ``every`` at which more than ``keep`` tokens are stored
            request.first_compression = n + self.every * -(-(keep + 1 - n) // self.every)
        request.observed = min(self.observed, n) if n > keep else 0
        if self.sums:
            request.observed = n

    def settle(self, request: Request) -> None:
        """Leave a request uncompressed if it ends before its first compression removes a token."""
        n = len(request.prompt)
        keep = request.keep
        last = request.end - 1  # the last token is drawn, but its KV is never computed
        if keep and (request.first_compression > last or (n <= keep and not self.every)):
            request.keep = 0
            if not request.pressure:
                request.observed = 0

    def hold(self, request: Request, end: int, block: int) -> int:
        """Return the most tokens that the KV cache holds for a row of a request that ends at ``end`` tokens.

        A compression needs additional blocks if the prompt's blocks may be cached prefixes or are shared by branches,
        because the kept tokens are then copied.
        """
        n = len(request.prompt)
        keep = request.keep
        if not keep or request.first_compression >= end:
            return end
        grown = min(self.every, end - n) if self.every else end - n
        before = max(n, min(end, keep + self.every)) if self.every else n
        after = keep + grown + block
        if not self.shares and request.params.width == 1:
            return max(before, after)
        return -(-before // block) * block + after

    def check(self, request: Request, guided: bool) -> None:
        """Raise RequestError if a request with a KV budget cannot be compressed, because it has beams or a guide.
        Without a budget, such a request is only excluded from compression under memory pressure."""
        if request.beams is not None or guided:
            request.pressure = 0
            if not request.keep:
                request.observed = 0
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
        """Compress the rows that have computed their tokens up to their next compression, if enough blocks are
        available.

        Under memory pressure the rows to compress are chosen first.
        """
        s = planner.slots
        if self.pressure is not None:
            self.pressure.choose(s, planner.cache)
        due = s.running[s.computed[s.running] >= s.compress_at[s.running]]
        for slot in due.tolist():
            seq = s.seq[slot]
            if seq is None or self._waits(planner, slot):
                # the row was preempted to free blocks for another row, or its steps in flight must
                # be collected first
                continue
            computed = int(s.computed[slot])
            keep = self._tokens_to_keep(seq, computed)
            compactions = self._with_room(planner, slot, keep)
            if compactions is None:
                continue
            planner.cache.compact(compactions)
            if compactions:
                self.compressions += 1
                self.dropped += max(one.stored - one.kept for one in compactions)
                seq.compressions[computed] = keep
                if seq.request.reads_kept and computed not in seq.kept:
                    for one in compactions:
                        one.reader = seq
            s.compress_at[slot] = self._next(seq, computed)
            s.changes += 1

    def _waits(self, planner: CompressingPlanner, slot: int) -> bool:
        """Return whether a row cannot be compressed yet, because its steps in flight must be collected first, or
        because it ends with these steps."""
        s = planner.slots
        if s.step[slot] <= s.published:
            return False
        if s.known[slot] >= s.end[slot]:
            return True
        publishes = planner.cache.prefix and s.prefix_published[slot] < s.table.shape[2]
        return bool(publishes or s.forking[slot])

    def _tokens_to_keep(self, seq: Seq, computed: int) -> int:
        """Return the number of tokens that a row keeps when it is compressed at ``computed`` tokens.  If it was
        compressed at this point before a preemption, the number of that time is returned."""
        recorded = seq.compressions.get(computed)
        if recorded is not None:
            return recorded
        request = seq.request
        if request.keep and computed == self._next_regular(request, computed - 1):
            return request.keep
        assert self.pressure is not None, "a compression without a budget"
        return self.pressure.tokens_to_keep(request, computed)

    def _next(self, seq: Seq, computed: int) -> int:
        """Return at which number of computed tokens a row is compressed next, when it has computed ``computed``
        tokens."""
        return min(self._next_regular(seq.request, computed), next_recorded(seq, computed))

    def _next_regular(self, request: Request, computed: int) -> int:
        """Return the number of computed tokens, above ``computed``, at which the next regular compression is due.

        Compressions under memory pressure are not considered.  NEVER means that no further one is due."""
        first = request.first_compression
        if not request.keep:
            return NEVER
        if computed < first:
            return first
        return computed + self.every - (computed - first) % self.every if self.every else NEVER

    def observe(
        self, s: Slots, slots: np.ndarray, computed: np.ndarray, q_len: np.ndarray
    ) -> dict[str, Any]:
        """Return the columns ``observe`` and ``sums`` of a plan: the rows whose queries the next compression reads, and
        the rows whose attention is added up.

        A compression reads the last queries of the prompt at first, and later the last query only.  ``computed`` i32
        [R] are the numbers of tokens that the rows had before the step, and ``q_len`` i32 [R] the numbers of tokens in
        the step.
        """
        found = self._summed(s, slots, computed) if self.sums else {}
        if not self.observed:
            return found
        end = s.compress_at[slots]
        first = end - np.where(
            end == s.prompt[slots], np.minimum(self.observed, s.prompt[slots]), 1
        )
        after = computed + q_len
        rows = np.flatnonzero((after > first) & (after <= end))
        if not len(rows):
            return found
        before = computed[rows] > first[rows]
        count = np.where(before, q_len[rows], after[rows] - first[rows])
        return {**found, "observe": np.stack([rows, count, before], axis=1).astype(np.int32)}

    def _summed(self, s: Slots, slots: np.ndarray, computed: np.ndarray) -> dict[str, np.ndarray]:
        """Return the column ``sums`` of a plan: the rows that compute their prompt and may be compressed."""
        rows = np.flatnonzero(computed < s.prompt[slots]).tolist()
        summed = [row for row in rows if s.at(int(slots[row])).request.observed]
        return {"sums": np.array(summed, np.int32)} if summed else {}

    def upto(self, s: Slots, rows: np.ndarray, upto: np.ndarray) -> np.ndarray:
        """Return, for each running row, up to which number of tokens the next step may compute, at most ``upto``.

        No step continues past a compression.  If attention is summed, no step continues past the end of the prompt."""
        upto = np.minimum(upto, s.compress_at[rows])
        if not self.sums:
            return upto
        prompt = s.prompt[rows]
        return np.where(s.computed[rows] < prompt, np.minimum(upto, prompt), upto)

    def _with_room(
        self, planner: CompressingPlanner, slot: int, keep: int
    ) -> list[Compaction] | None:
        """Return the compressions of a row to ``keep`` tokens in each KV group; None if the blocks that they take are
        not available.

        Under memory pressure the row's own blocks may leave the prefix cache, so that the kept tokens can move to them.
        If the row is the oldest, other rows are preempted for the blocks."""
        s = planner.slots
        cache = planner.cache
        found = cache.to_compact(slot, keep)
        if self.pressure is not None and not cache.can_take(_taken(found, len(cache.pools))):
            found = cache.to_compact(slot, keep, private=True)
        need = _taken(found, len(cache.pools))
        while not cache.can_take(need):
            if (
                s.id[slot] != s.id[s.running].min()
                or planner.make_room(slot, int(need.sum())) == slot
            ):
                return None
        return found

    def stats(self) -> dict[str, Any]:
        """Return the number of compressions, and of the tokens that they removed from each layer."""
        return {"compressions": self.compressions, "dropped_tokens": self.dropped}


def _taken(compactions: list[Compaction], groups: int) -> np.ndarray:
    """Return the number of new blocks that compactions take in each KV group, i32 [groups, 1]."""
    need = np.zeros((groups, 1), np.int32)
    for one in compactions:
        need[one.group] = one.to_take
    return need
