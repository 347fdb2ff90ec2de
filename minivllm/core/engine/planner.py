"""The planner, which makes a StepPlan from policy, token budget and blocks on the host, without torch or waiting.

Computed tokens catch up with known tokens.  A row that lacks one token decodes, and any other row computes a chunk of
its prompt.  Decodes come first.  The rest of the budget is used for chunks, and then for new rows::

    budget 16 |d d d|p p p p p p|n n n n n n n|      d: one token each, p: a running row's chunk, n: admitted now

A planned step counts as done.  ``computed`` and ``known`` run ahead of the device, so the next step can be planned
before the tokens of this one are collected.  Progress is guaranteed.  The oldest running row is never preempted.  A
request is accepted only if it fits alone.  A row that was preempted ``PROTECTED_AFTER`` times returns with all blocks
that it needs.
"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core import checks
from minivllm.core.interfaces.plan import NO_CHANGE, Delta, StepPlan, no_rows, with_drafts
from minivllm.core.interfaces.scheduler import Load, SchedulerPolicy, StepShape
from minivllm.errors import describe_error

from .admission import queue_view, row_of
from .forks import apply_pending, enter_beams, fork_ready, preempt_beams
from .guides import enter_guide
from .images import whole_images
from .owners import (
    OwnerShares,
    candidates,
    displace,
    make_way,
    of_the_largest,
    owner_count,
    who_is_stuck,
)
from .plan_columns import join_of, requested_columns, step_rows
from .request import RUNNING, WAITING
from .sessions import report_turn
from .steady import Steady, next_steady, steady_of
from .step_limit import StepLimit
from .taps import most_cached
from .underway import MOST_PASSED, Underway
from .waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minivllm.core.timing import SeamTimes

    from .adapters import EngineAdapters
    from .beams import Beams
    from .cache import KVCache
    from .compression import Compression
    from .events import EngineEvents
    from .images import Images
    from .request import FinishSequence, Seq
    from .slots import Slots
    from .speculation import Speculation
    from .step_budget import StepBudget

PROTECTED_AFTER = 8
MIX = StepShape()
NO_SLOTS = no_rows(dtype=np.intp)
NO_DRAFTS = no_rows()


class Planner:
    """Queue of waiting sequences, and the planning of each step."""

    def __init__(
        self,
        slots: Slots,
        cache: KVCache,
        policy: SchedulerPolicy,
        max_tokens: int,
        seams: SeamTimes,
        finish: FinishSequence,
        events: EngineEvents,
        speculation: Speculation | None = None,
        adapters: EngineAdapters | None = None,
        compression: Compression | None = None,
        images: Images | None = None,
        budget: StepBudget | None = None,
        limit: StepLimit | None = None,
    ) -> None:
        self.limit, self.budget = limit or StepLimit(0), budget
        self.compression, self.images = compression, images
        self.encodes_apart, self.most_tokens = False, max_tokens  # see ``_encoded``
        self.slots = slots
        self.cache = cache
        self.policy = policy
        self.max_tokens = max_tokens
        self.seams = seams
        self.finish, self.events, self.speculation = finish, events, speculation
        self.adapters = adapters
        self.waiting = WaitingQueue()
        self.underway = Underway(cache, slots)
        self.step_id = 0
        # largest number of prompt tokens of a step; a server lowers it if steps would take too long
        self.most_prefill = max_tokens
        self.reserved = 0  # slots that are reserved for branches that will fork
        self.wake_at = 0.0  # time before which the policy admits no sequence; 0 means no hold
        self.preemptions = 0
        # serial number -> sequence that left its slot with steps in flight
        self.departed: dict[int, Seq] = {}
        self.left: list[int] = []  # slots that were left since the last plan
        self.keeps: list[tuple[int, int]] = []  # (slot, sequence) preempted since the last plan
        self.forgotten: list[int] = []  # preempted sequences that ended since the last plan
        self.steady: Steady | None = None  # the last plan, if the next step may repeat it
        # (slot, token) chosen on the host since the last plan
        self.chosen: list[tuple[int, int]] = []
        self.joins: list[tuple[int, Seq]] = []  # (slot, seq) that took a slot since the last plan
        self.forks: list[tuple[int, int, Seq]] = []  # new (parent slot, slot, branch)
        self.searches: list[Beams] = []  # beam searches with decisions that are not applied yet
        self._ended: list[Seq] = []  # ended since the last plan, for policies with ``ended``
        self.shared = False  # whether at least one request has an owner (see ``owners``)
        # waiting sequence whose owner has no row, if the last plan had no room for it
        self.stuck: Seq | None = None
        # whether the last refused sequence had no place for its adapter, or no memory for its images
        self.placeless = False
        self.way_for = -1  # id of the last sequence for which a row was preempted
        self.protected_after = PROTECTED_AFTER
        # the last plan had no slot or no blocks for the next waiting sequence
        self.unplaced = False
        checks.window(policy)
        own, base = type(policy), SchedulerPolicy
        self.asks_shape, self.divides = own.shape is not base.shape, own.lane is not base.lane
        self.orders = own.order is not base.order or self.divides
        self._ends = own.ended is not base.ended

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        return self.seams.run("scheduler", question, *args)

    # ---- the queue ---------------------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        return self.waiting.n

    def add(self, seq: Seq) -> None:
        """Queue a new sequence, or a preempted one without a step in flight.

        It first waits outside the queue if its adapter must be loaded, or if a tier has pages of it.
        """
        seq.status = WAITING
        if self.adapters is not None and self.adapters.begin(seq):
            return
        tiers = self.cache.tiers
        if tiers is not None and seq.load is None and tiers.begin(seq):
            return
        row, seq.hint = row_of(seq), None
        view = queue_view([row])
        key = checks.key(self.ask(self.policy.key, view))
        lane = (
            checks.lane(self.ask(self.policy.lane, view))
            if self.divides
            else seq.request.owner_number
        )
        self.shared |= seq.request.owner_number > 0
        self.waiting.push(seq, key, lane, row)

    def end(self, seq: Seq) -> None:
        """Remove a sequence that ends from its slot or from the queue.  A row with a guide leaves together with it."""
        self.slots.changes += 1
        if seq.slot >= 0:
            for one in seq.pair:
                self.leave(one.slot)
        elif seq.queued:
            self.waiting.remove(seq)
        if self.cache.tiers is not None:
            self.cache.tiers.leave(seq)
        if self.adapters is not None:
            self.adapters.leave(seq)
        if seq.saved:
            self.forgotten.append(seq.id)
        if self._ends:
            self._ended.append(seq)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def next(self, now: float) -> StepPlan | None:
        """Plan the next step at the time ``now`` in seconds.

        Return None if no row can run: all rows wait for results, or there are no requests.
        """
        if (plan := next_steady(self)) is not None:
            return plan
        s, self.steady, self.encodes_apart = self.slots, None, False
        # remove forks whose branch left its slot before it was in a plan
        if self.forks:
            self.forks = [fork for fork in self.forks if s.seq[fork[1]] is fork[2]]
        # A fork that was not sent to the device yet still reads its parent's row.
        if s.cooling and not self.forks:
            s.free.extend(s.cooling)
            s.cooling.clear()
        if self._ended:
            ended, self._ended = self._ended, []
            self.ask(self.policy.ended, queue_view([row_of(seq) for seq in ended]))
        shape = MIX
        if self.asks_shape:
            shape = checks.shape(self.ask(self.policy.shape, self._load(now), now))
        if self.stuck is not None:
            make_way(self)
        if self.unplaced and self.policy.preemptive:
            displace(self, now)
        self.wake_at = shape.hold_until if shape.hold_until > now and self.n_waiting else 0.0
        if self.searches:
            apply_pending(self)
        fork_ready(self)
        if self.compression is not None:
            self.compression.plan(self)
        if self.cache.slides:
            self.cache.trim(s.running)
        need = self.need(s.running)
        decode = self._decode(need) if shape.kind == "mix" else NO_SLOTS
        chunks: dict[int, int] = {}  # slot -> tokens
        if self.n_waiting or np.count_nonzero(need > 1):
            decode = self._fill(shape, decode, chunks, now)
        if shape.kind != "mix" and not chunks:
            decode = self._decode(self.need(s.running))
        if not len(decode) and not chunks and s.forking[s.running].any():
            # A new row whose prompt was cached, or has one token, can fork now.
            fork_ready(self)
            decode = self._decode(self.need(s.running))
        return self._make_plan(decode, chunks, self.max_tokens - len(decode) - sum(chunks.values()))

    def _load(self, now: float) -> Load:
        """Return the load, from which a scheduler policy derives the shape of a step."""
        s, head = self.slots, self.waiting.head()
        return Load(
            waiting=self.n_waiting,
            running=len(s.running),
            prefilling=int((self.need(s.running) > 1).sum()),
            free_blocks=self.cache.available,
            total_blocks=min(pool.total for pool in self.cache.pools),
            token_budget=self.max_tokens,
            oldest_wait=0.0 if head is None else max(0.0, now - head.request.arrival),
            tpot_slack=float(s.tpot_due[s.running].min(initial=np.inf)) - now,
            evicted_needed=sum(pool.lost.needed for pool in self.cache.pools),
        )

    def _fill(
        self, shape: StepShape, decode: np.ndarray, chunks: dict[int, int], now: float
    ) -> np.ndarray:
        """Plan prompt chunks for running rows and for new rows within the token budget.  Return the rows that still
        decode, because preemption may remove some."""
        s = self.slots
        self.encodes_apart = self.images is not None and len(decode) > 0
        cap = self.max_tokens if shape.prefill_cap is None else int(shape.prefill_cap)
        most = min(self.most_prefill, self._timely(decode))
        parts = OwnerShares(
            min(
                self.max_tokens - len(decode),
                cap,
                most,
                self.limit.most(len(decode), self.max_tokens),
            ),
            owner_count(s, s.running[self.need(s.running) > 1], self.waiting.heads())
            if self.shared
            else 1,
        )
        self.most_tokens = parts.left
        static = shape.kind == "static"
        admits = not self.wake_at and not (static and len(s.running))
        spare = self._spare(parts.left, most) if admits else 0
        parts.left -= spare
        decode = self._prefill(chunks, parts, decode)
        parts.left += spare
        if admits:
            self._admit(chunks, parts, now, static)
        if parts.join() or (spare and parts.left > 0):
            decode = self._prefill(chunks, parts, decode)
            if admits and not static:
                self._admit(chunks, parts, now)
        return decode

    def note(self, plan: StepPlan, device_ms: float) -> None:
        """Update the learned times with a finished step that took ``device_ms`` on the device."""
        if self.budget is not None:
            self.budget.note(plan, device_ms)

    def _timely(self, decode: np.ndarray) -> int:
        """Return the most prompt tokens with which the step ends in time for the tokens of the rows ``decode``."""
        s, budget = self.slots, self.budget
        if budget is None or not len(decode):
            return self.max_tokens
        rows = s.running[self.need(s.running) > 1]
        heads = self.waiting.heads() if self.n_waiting else []
        lengths = [*(s.known[rows] - s.computed[rows]).tolist(), *(seq.known for seq in heads)]
        return budget.most(
            len(decode), int(s.computed[rows].max(initial=0)), max(lengths, default=1)
        )

    def _spare(self, budget: int, most: int) -> int:
        """Return the budget tokens to reserve for a waiting short prompt; 0 reserves none.  Where time limits a step to
        ``most`` prompt tokens, a short prompt would otherwise wait for all of a long prompt that takes many steps."""
        if most >= self.max_tokens or not self.n_waiting:
            return 0
        least = min(seq.known for seq in self.waiting.heads())
        return least if 4 * least <= budget else 0

    def need(self, run: np.ndarray) -> np.ndarray:
        """Count the tokens that each running row has to compute; 0 where the row waits.  ``run`` holds slots."""
        s = self.slots
        may = s.ready[run] & (s.known[run] < s.end[run])
        upto = s.schedulable[run]
        if self.compression is not None:
            upto = self.compression.upto(s, run, upto)
        return (upto - s.computed[run]) * may

    def _decode(self, need: np.ndarray) -> np.ndarray:
        """Return the rows that lack one token and have the blocks for it.

        Rows are preempted if blocks are missing.  ``need`` holds the missing tokens of each running row.
        """
        s = self.slots
        rows = s.running[need == 1][: self.max_tokens]
        missing = self.cache.missing(rows, s.computed[rows] + 1)
        if not np.count_nonzero(missing):
            return rows
        while np.count_nonzero(missing) and not self.cache.can_take(missing):
            lacking = rows[missing.any(axis=0)]
            gone = self.make_room(int(lacking[np.argmax(s.id[lacking])]), int(missing.sum()))
            # partners leave together
            left = (rows == gone) | (s.partner[rows] == gone) | (s.serial[rows] < 0)
            rows, missing = rows[~left], missing[:, ~left]
        self.cache.grow(rows, missing)
        return rows

    def make_room(self, requester: int, need: int) -> int:
        """Preempt one row to free ``need`` blocks for the row ``requester``, and return the slot that leaves this step.

        The returned slot is the victim, or the requester itself.  The requester is preempted unless its age or its
        number of preemptions protects it; a protected requester only waits.
        """
        s, oldest = self.slots, self.slots.id[self.slots.running].min()
        victim = self.preempt_one_of(s.running, need)
        unreserved = len(self.cache.pools) > 1 or self.cache.compacts
        if victim is None and s.id[requester] == oldest and unreserved:
            # Blocks of a sliding window and target blocks of a compression are not reserved ahead of time, so protected
            # rows may be preempted too.
            victim = self.preempt_one_of(s.running, need, True)
        if victim is not None:
            return victim
        if s.id[requester] != oldest and (
            s.preempted[requester] < PROTECTED_AFTER or s.beam[requester]
        ):
            self.preempt(requester)
        return requester

    def preempt_one_of(self, rows: np.ndarray, need: int, protected: bool = False) -> int | None:
        """Preempt the row of ``rows`` that the policy selects, and return its slot; None if no row may be preempted.
        Candidates belong to the owner with most of the rows.  ``protected`` allows rows that were preempted often."""
        s = self.slots
        rows = rows[s.id[rows] != s.id[s.running].min()]  # all beams of a request have the same id
        if not protected:
            # Rows that wait to fork and beams have no blocks reserved for branches, so they may be preempted.
            rows = rows[(s.preempted[rows] < PROTECTED_AFTER) | s.forking[rows] | s.beam[rows]]
        if not len(rows):
            return None
        rows = of_the_largest(s, rows) if self.shared else rows
        index = self.ask(self.policy.victim, s.view(rows), need)
        victim = int(rows[checks.whole(index, 0, len(rows) - 1, "victim() gave")])
        self.preempt(victim)
        return victim

    def preempt(self, slot: int) -> None:
        """Move a running row back to the queue.

        Its blocks are freed and its tokens are kept, so its KV is computed again later.  It is queued once its steps in
        flight have been collected (see ``Publisher``).
        """
        seq = self.slots.at(slot)
        seq = seq.lead or seq
        self.preemptions += 1
        if seq.request.beams is not None:
            preempt_beams(self, seq.request.beams)
        else:
            # Keep columns on the device only if it has received this row.
            if all(other is not seq for *_, other in (*self.joins, *self.forks)):
                self.keeps.append((seq.slot, seq.id))
                seq.saved = True
            for one in seq.pair:
                one.preempted += 1
                self.leave(one.slot)
                one.status = WAITING
        self.events.sequence_preempted(seq)
        self.requeue(seq)

    def requeue(self, seq: Seq) -> None:
        """Queue a preempted sequence again unless a step in flight contains it.

        It ends with an error if the policy fails on it.  All beams of a request are one entry of the queue, and so are
        a sequence and its guide.
        """
        seq = seq.lead or seq
        if any(one.in_flight for one in seq.pair):
            return
        beams = seq.request.beams
        if beams is not None:
            if not beams.resting:
                return
            seq = beams.seqs[0]
        try:
            self.add(seq)
        except Exception as e:
            self.finish(
                seq,
                "error",
                error=f"scheduler {type(self.policy).__name__} failed on it: {describe_error(e, self.policy)}",
            )

    def leave(self, slot: int) -> None:
        """Remove a row from its slot and release its blocks.

        Later steps may use the blocks, because steps in flight run before them.
        """
        seq = self.slots.at(slot)
        if self.images is not None:
            self.images.leave(seq)
        if self.slots.forking[slot]:
            self.reserved -= len(seq.branches)
        self.cache.release(slot)
        self.slots.leave(slot)
        self.left.append(slot)
        # the next sequence in this slot must not receive the token
        self.chosen = [c for c in self.chosen if c[0] != slot]
        if seq.in_flight:
            self.departed[seq.serial] = seq

    def _prefill(
        self, chunks: dict[int, int], parts: OwnerShares, decode: np.ndarray
    ) -> np.ndarray:
        """Plan chunks in ``chunks`` for running rows that lack more than one token, or extend their chunks.

        Return the rows that still decode.  Only the oldest row preempts other rows for blocks; the other ones wait.
        """
        s = self.slots
        need = self.need(s.running)
        rows, need = s.running[need > 1], need[need > 1]
        if not len(rows):
            return decode
        oldest = s.id[s.running].min()
        for slot, want in zip(rows.tolist(), need.tolist(), strict=True):
            if parts.left <= 0:
                break
            if s.seq[slot] is None:
                continue  # the row was preempted for the oldest
            owner_number, have = int(s.owner_number[slot]), chunks.get(slot, 0)
            more = min(self._encoded(slot, want) - have, parts.most(owner_number))
            if more <= 0:
                continue  # the owner has spent its share
            chunk = self._grow_chunk(slot, have + more)
            while not chunk and s.id[slot] == oldest:
                if self.make_room(slot, 1) == slot:
                    break
                decode = decode[s.serial[decode] >= 0]
                for gone in [c for c in chunks if s.seq[c] is None]:
                    parts.spend(int(s.owner_number[gone]), -chunks.pop(gone))
                chunk = self._grow_chunk(slot, min(want, parts.most(owner_number)))
            if chunk:
                chunks[slot] = chunk
                parts.spend(owner_number, chunk - have)
        return decode

    def _encoded(self, slot: int, tokens: int) -> int:
        """Return the number of next tokens of a row that the step may compute.

        A step with decoding rows (``encodes_apart``) computes no image whose features are missing.  The features are
        computed in an earlier step, so that decoding rows wait either for the features or for the tokens.  Without
        decoding rows, prompts and images have ``most_tokens`` in a step.
        """
        if not self.encodes_apart or self.images is None:
            return tokens
        seq = self.slots.at(slot)
        return min(tokens, self.images.encoded_tokens(seq, int(self.slots.computed[slot])))

    def _room(self, slot: int, chunk: int, promised: int = 0) -> tuple[int, int]:
        """Return (tokens, blocks) of a chunk as ``KVCache.room`` does.

        The chunk does not end inside an image whose tokens attend to each other.  It may be longer than ``chunk`` to
        contain such an image as a whole.
        """
        if self.images is None or not self.images.undivided:
            return self.cache.room(slot, chunk, promised)
        request, first = self.slots.at(slot).request, int(self.slots.computed[slot])
        wanted = whole_images(request, first, chunk, extend=True)
        tokens, blocks = self.cache.room(slot, wanted, promised)
        if tokens < wanted:
            fitting = whole_images(request, first, tokens, extend=False)
            tokens, blocks = self.cache.room(slot, fitting, promised)
        return tokens, blocks

    def _grow_chunk(self, slot: int, chunk: int) -> int:
        """Take the blocks of the part of a chunk that fits, and return the number of its tokens (see ``_room``)."""
        return self.cache.grow_chunk(slot, self._room(slot, chunk)[0])

    # ---- newcomers ---------------------------------------------------------------------------------------------------

    def _admit(
        self, chunks: dict[int, int], parts: OwnerShares, now: float, static: bool = False
    ) -> None:
        """Admit waiting sequences and plan their first chunks in ``chunks``.  A ``static`` batch enters at once, even
        if its tokens exceed the budget.  Blocks are first promised to each row, then taken for all rows together."""
        s, new, promised, refused = self.slots, dict[int, int](), 0, None
        self.placeless = False
        self.underway.refresh()
        delayed: list[Seq] = []  # sequences that wait for a prefix that a running row computes
        planned = ChainMap(new, chunks)
        try:
            for seq in self._newcomers(now, None if static else parts):
                if (parts.left <= 0 and not static) or len(delayed) == MOST_PASSED:
                    break
                if not static and self.underway.delays(seq, planned):
                    self.waiting.remove(seq)
                    delayed.append(seq)
                    continue
                if not self._enter(seq, promised):
                    refused = seq  # no later sequence overtakes the first one that does not fit
                    break
                seq.request.scheduled = seq.request.scheduled or now
                owner_number = seq.request.owner_number
                for slot in [one.slot for one in seq.pair]:
                    upto = s.schedulable[[slot]]
                    if self.compression is not None:
                        upto = self.compression.upto(s, np.array([slot]), upto)
                    whole = min(int(upto[0] - s.computed[slot]), parts.most(owner_number))
                    want = self._encoded(slot, whole)
                    if want < whole:
                        parts.spend(
                            owner_number, whole - want
                        )  # the features of images count as tokens too
                    if want > 0:
                        tokens, blocks = self._room(slot, want, promised)
                        if tokens:
                            new[slot] = tokens
                        promised += blocks
                        parts.spend(owner_number, tokens)
        finally:  # the other sequences remain in the queue even if a plug-in raises
            self.underway.delayed = delayed
            for seq in delayed:
                self.waiting.push(seq, seq.key, seq.lane, row_of(seq))
        if new:
            rows = np.fromiter(new, np.int32, len(new))
            upto = s.computed[rows] + np.fromiter(new.values(), np.int32, len(new))
            self.cache.grow(rows, self.cache.missing(rows, upto))
            chunks |= new
        full = len(s.free) <= self.reserved or not self.cache.available
        self.unplaced = self.n_waiting > 0 and (refused is not None or full)
        # A row that is preempted leaves its adapter's place to other rows of the adapter.
        if self.shared and self.n_waiting and self.stuck is None and not self.placeless:
            self.stuck = who_is_stuck(self, refused)

    def _newcomers(self, now: float, parts: OwnerShares | None) -> Iterator[Seq]:
        """Yield the waiting sequences in the order of admission while a slot and blocks are free.  When all selected
        sequences have entered, the policy selects again."""
        s, entered = self.slots, True
        while entered and self.n_waiting and len(s.free) > self.reserved and self.cache.available:
            entered = False
            for seq in candidates(self, now, parts):
                yield seq
                entered = True

    def _enter(self, seq: Seq, promised: int) -> bool:
        """Move a waiting sequence into a slot with its prefix hit, and return True.

        Return False without a change if no slot is free, or if blocks for all its known tokens are missing.
        ``promised`` blocks are reserved for other rows.
        """
        s = self.slots
        beams, guide = seq.request.beams, seq.guide
        wide = len(seq.pair) + len(seq.branches) if beams is None else beams.width
        if len(s.free) - self.reserved < wide:
            return False
        most = seq.known if beams is None or len(beams.live) == 1 else beams.common() + 1
        most = most_cached(seq, most)
        hit = self.cache.lookup(seq, most)
        protected = seq.preempted >= PROTECTED_AFTER and beams is None
        upto = seq.request.stored if protected else min(seq.known, seq.request.stored)
        spare = promised + (0 if protected or not len(s.running) else 1 + len(s.running) // 8)
        beside = 0 if guide is None else guide.request.end if protected else guide.known
        if not self.cache.has_room(hit, upto, spare, beside):
            return False
        if self.adapters is not None and not self.adapters.place(seq):
            self.placeless = True
            return False
        if self.images is not None and not self.images.place(seq):
            self.placeless = True
            return False
        self.waiting.remove(seq, served=True)
        slot = s.enter(seq)
        self.joins.append((slot, seq))
        seq.status = RUNNING
        cached = self.cache.adopt(slot, hit, most)
        self.underway.enter(slot)
        if not seq.preempted:
            report_turn(self.cache, seq, "began")
        if not seq.preempted and seq is seq.request.sequences[0]:
            seq.request.cached_tokens = cached
        if protected:
            self.cache.reserve(slot, upto)
        if seq.branches:
            self.reserved += len(seq.branches)
            s.forking[slot], s.schedulable[slot] = True, s.prompt[slot] - 1
        if beams is not None:
            enter_beams(self, beams)
        if guide is not None:
            enter_guide(s, self.cache, self.joins, seq, protected)
        return True

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def _make_plan(
        self, decode: np.ndarray, chunks: dict[int, int], budget: int
    ) -> StepPlan | None:
        """Build the step from the decoding slots and the chunks (slot -> tokens), or return None if it has no rows.

        Draft tokens use the rest of ``budget``.
        """
        s, spec = self.slots, self.speculation
        most, ahead, n = 0, False, NO_DRAFTS
        if spec is not None and budget > 0:
            most = spec.most_drafts(len(decode), sum(chunks.values()))
            ahead = spec.ahead and not (s.tapping or s.paired or s.asking or s.pooling)
            n = spec.drafts(s, self.cache, decode, most, budget, ahead) if most else n
        decode, n, draft = with_drafts(decode, n) if n.any() else (decode, NO_DRAFTS, NO_DRAFTS)
        at, q_len, draft = step_rows(decode, n, draft, chunks)
        if not len(at):
            return None
        if self.images is not None:
            self.images.reach(s, at, q_len)
            if self.encodes_apart:
                self.images.encode_next(s, self.most_tokens - sum(chunks.values()))
        delta, computed = self._delta(), s.computed[at]
        if len(draft):
            computed += draft
        # the last position of a row with drafts is stored
        s.computed[at] = after = computed + q_len
        draws = after == s.known[at]
        if s.pooling:
            draws &= ~s.pooled[at]
        if len(draft):
            draws |= draft > 0
        drawn = at[draws]
        s.known[drawn] = s.schedulable[drawn] = s.known[drawn] + 1
        if most and not ahead:
            s.ready[drawn[s.speculates[drawn]]] = False
        slack = s.slack[at]
        if len(draft):
            mine = at[draft > 0]
            # an upper bound, which ``Publisher._take_back`` lowers
            s.known[mine] = s.schedulable[mine] = after[draft > 0] + 1
            s.slack[mine] = (slack + draft)[draft > 0]  # the last row of a slot counts
        self.step_id += 1
        s.step[at] = self.step_id
        plan = StepPlan(
            id=self.step_id,
            slots=at.astype(np.int32),
            q_len=q_len,
            computed=computed,
            samples=draws.nonzero()[0].astype(np.int32),
            draft=draft,
            slack=slack if slack.any() else NO_DRAFTS,
            delta=delta,
            **requested_columns(s, at, computed, q_len, draws),
            **(
                {} if self.compression is None else self.compression.observe(s, at, computed, q_len)
            ),
        )
        self.steady = steady_of(self, plan, at)
        return plan

    def _delta(self) -> Delta:
        """Return the changes since the last plan that the device has not received, and clear them."""
        s = self.slots
        forks = [(parent, slot, b.sample) for parent, slot, b in self.forks if s.seq[slot] is b]
        # A parent may be preempted, but the fork still copies its columns.
        parents = {parent for parent, _, _ in forks}
        joins = [(slot, seq) for slot, seq in self.joins if s.seq[slot] is seq or slot in parents]
        changes: dict[str, Any] = self.cache.changes()
        if joins:
            changes["join"] = join_of(joins, s, self.images)
        noted: dict[str, list[Any]] = {"leave": self.left, "fork": forks, "token": self.chosen}
        changes |= {name: np.array(rows, np.int32) for name, rows in noted.items() if rows}
        if self.adapters is not None and (rows := self.adapters.changes()):
            changes["adapter"] = np.array(rows, np.int32)
        if self.images is not None:
            changes |= self.images.changes()
        noted = {"keep": self.keeps, "forget": self.forgotten}
        changes |= {name: np.array(rows, np.int64) for name, rows in noted.items() if rows}
        for taken in (self.left, self.chosen, self.joins, self.forks, self.keeps, self.forgotten):
            taken.clear()
        return Delta(**changes) if changes else NO_CHANGE
