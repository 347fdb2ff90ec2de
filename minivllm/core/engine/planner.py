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

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core import checks
from minivllm.core.interfaces.plan import StepPlan, no_rows, with_drafts
from minivllm.core.interfaces.scheduler import Load, SchedulerPolicy, StepShape
from minivllm.errors import describe_error

from .admission import queue_view, row_of
from .forks import apply_pending, fork_ready, preempt_beams
from .images import whole_images
from .newcomers import admit
from .owners import OwnerShares, displace, make_way, of_the_largest, owner_count
from .plan_columns import requested_columns, step_rows
from .plan_delta import take_delta
from .request import WAITING
from .steady import Steady, next_steady, steady_of
from .steady_drafts import SteadyDrafts, next_drafted, steady_drafts_of
from .step_limit import StepLimit
from .underway import Underway
from .waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Plans each step: which rows run, with how many tokens and which blocks.  It also has the queue of waiting
    sequences."""

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
        self.limit = limit or StepLimit(0)
        self.budget = budget
        self.compression = compression
        self.images = images
        self.encodes_apart = False  # see ``encoded``
        self.most_tokens = max_tokens
        self.slots = slots
        self.cache = cache
        self.policy = policy
        self.max_tokens = max_tokens
        self.seams = seams
        self.finish = finish
        self.events = events
        self.speculation = speculation
        self.adapters = adapters
        self.waiting = WaitingQueue()
        self.underway = Underway(cache, slots)
        self.step_id = 0
        # a step has at most this many prompt tokens; a server lowers the number if steps would take
        # too long
        self.most_prefill = max_tokens
        self.reserved = 0  # count of slots that are reserved for branches of running rows
        # time in seconds before which the policy admits no sequence; 0 means at once
        self.wake_at = 0.0
        self.preemptions = 0
        self._add_changes()
        # the last plan, if the next step may be equal except for one more token per row
        self.steady: Steady | None = None
        # the last plan, if all its rows had drafts and the next step may have as many
        self.drafted: SteadyDrafts | None = None
        self.searches: list[Beams] = []  # beam searches whose last decisions are not applied yet
        self.shared = False  # whether at least one request has an owner (see ``owners``)
        # a waiting sequence whose owner has no row, and for which the last plan had no room
        self.stuck: Seq | None = None
        # whether the last sequence that could not enter a slot lacked device memory for its LoRA
        # adapter or for its images, instead of blocks
        self.placeless = False
        # id of the last sequence for which a row was preempted (see ``owners.make_way``)
        self.way_for = -1
        self.protected_after = PROTECTED_AFTER
        # whether the last plan had no slot or no blocks for the next waiting sequence
        self.unplaced = False
        self._read_policy(policy)

    def _add_changes(self) -> None:
        """Create the empty lists that record changes for the next plan, and the dict of the sequences that leave
        their slots while a step with them is in flight."""
        # serial number of a stay in a slot -> the sequence, which has left the slot while steps
        # with it are in flight
        self.departed: dict[int, Seq] = {}
        self.left: list[int] = []  # slots that sequences have left since the last plan
        # (slot, sequence id) of rows preempted since the last plan, whose columns the device keeps
        self.keeps: list[tuple[int, int]] = []
        # ids of sequences that ended, whose columns the device had kept
        self.forgotten: list[int] = []
        # (slot, token id) of tokens that the host chose since the last plan
        self.chosen: list[tuple[int, int]] = []
        # (slot, sequence) pairs that took a slot since the last plan
        self.joins: list[tuple[int, Seq]] = []
        # (parent slot, slot, branch) of rows that forked since the last plan
        self.forks: list[tuple[int, int, Seq]] = []
        # sequences that ended since the last plan, for policies with a method ``ended``
        self._ended: list[Seq] = []

    def _read_policy(self, policy: SchedulerPolicy) -> None:
        """Record which methods the scheduling policy overrides.  The other methods need not be called."""
        checks.window(policy)
        own = type(policy)
        base = SchedulerPolicy
        self.asks_shape = own.shape is not base.shape
        self.divides = own.lane is not base.lane
        self.orders = own.order is not base.order or self.divides
        self._ends = own.ended is not base.ended

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        return self.seams.run("scheduler", question, *args)

    # ---- the queue ---------------------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        return self.waiting.n

    def add(self, seq: Seq) -> None:
        """Queue a new sequence, or a preempted one that is not in a step in flight.

        It waits outside of the queue first, if its LoRA adapter must be loaded, or if KV pages of its prompt are loaded
        from a tier (CPU memory or disk)."""
        seq.status = WAITING
        if self.adapters is not None and self.adapters.begin(seq):
            return
        tiers = self.cache.tiers
        if tiers is not None and seq.load is None and tiers.begin(seq):
            return
        row = row_of(seq)
        seq.hint = None
        view = queue_view([row])
        key = checks.key(self.ask(self.policy.key, view))
        lane = seq.request.owner_number
        self.shared |= lane > 0
        if self.divides:
            lane = checks.lane(self.ask(self.policy.lane, view))
        self.waiting.push(seq, key, lane, row)

    def end(self, seq: Seq) -> None:
        """Remove a sequence that ends from its slot or from the queue.  The guide of a sequence leaves together with
        it."""
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
        plan = next_steady(self) or next_drafted(self)
        if plan is not None:
            return plan
        s = self.slots
        self.steady = self.drafted = None
        self.encodes_apart = False
        if self.images is not None:
            self.images.step = self.step_id + 1
        # a branch may have left its slot before any plan contained the fork
        if self.forks:
            self.forks = [fork for fork in self.forks if s.seq[fork[1]] is fork[2]]
        # Slots that were left are reused from now on. With a pending fork they are not, because the
        # fork still reads its parent's slot.
        if s.cooling and not self.forks:
            s.free.extend(s.cooling)
            s.cooling.clear()
        if self._ended:
            rows = [row_of(seq) for seq in self._ended]
            self._ended = []
            self.ask(self.policy.ended, queue_view(rows))
        shape = MIX
        if self.asks_shape:
            load = self._load(now)
            shape = checks.shape(self.ask(self.policy.shape, load, now))
        if self.stuck is not None:
            make_way(self)
        if self.unplaced and self.policy.preemptive:
            displace(self, now)
        holds = shape.hold_until > now and self.n_waiting > 0
        self.wake_at = shape.hold_until if holds else 0.0
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
            # A new row with a cached prompt, or with a prompt of one token, can fork at once.
            fork_ready(self)
            decode = self._decode(self.need(s.running))
        left = self.max_tokens - len(decode) - sum(chunks.values())
        return self._make_plan(decode, chunks, left)

    def _load(self, now: float) -> Load:
        """Return the load of the engine (waiting and running rows, blocks, times), from which the scheduling policy
        decides the shape of a step."""
        rows = self.slots.running
        pools = self.cache.pools
        head = self.waiting.head()
        arrival = now if head is None else head.request.arrival
        prefilling = np.count_nonzero(self.need(rows) > 1)
        first_due = self.slots.tpot_due[rows].min(initial=np.inf)
        return Load(
            waiting=self.n_waiting,
            running=len(rows),
            prefilling=int(prefilling),
            free_blocks=self.cache.available,
            total_blocks=min(pool.total for pool in pools),
            token_budget=self.max_tokens,
            oldest_wait=max(0.0, now - arrival),
            tpot_slack=float(first_due) - now,
            evicted_needed=sum(pool.lost.needed for pool in pools),
        )

    def _fill(
        self, shape: StepShape, decode: np.ndarray, chunks: dict[int, int], now: float
    ) -> np.ndarray:
        """Plan prompt chunks for running rows and for new rows within the token budget.  Return the slots of ``decode``
        that still decode, because rows may have been preempted for blocks."""
        s = self.slots
        n = len(decode)
        self.encodes_apart = self.images is not None and n > 0
        cap = self.max_tokens if shape.prefill_cap is None else int(shape.prefill_cap)
        most = min(self.most_prefill, self._timely(decode))
        limit = self.limit.most(n, self.max_tokens)
        owners = 1
        if self.shared:
            prefilling = s.running[self.need(s.running) > 1]
            owners = owner_count(s, prefilling, self.waiting.heads())
        parts = OwnerShares(min(self.max_tokens - n, cap, most, limit), owners)
        self.most_tokens = parts.left
        static = shape.kind == "static"
        admits = not self.wake_at and not (static and len(s.running))
        spare = self._spare(parts.left, most) if admits else 0
        parts.left -= spare
        decode = self._prefill(chunks, parts, decode)
        parts.left += spare
        if admits:
            admit(self, chunks, parts, now, static)
        if parts.join() or (spare and parts.left > 0):
            decode = self._prefill(chunks, parts, decode)
            if admits and not static:
                admit(self, chunks, parts, now)
        return decode

    def note(self, plan: StepPlan, device_ms: float) -> None:
        """Update the learned step times with a finished step that took ``device_ms`` milliseconds on the device."""
        encoded = None if self.images is None else self.images.encoded_by(plan.id)
        if self.budget is not None:
            self.budget.note(plan, device_ms, encoded)

    def _timely(self, decode: np.ndarray) -> int:
        """Return how many prompt tokens the step may have, so that the rows in the slots ``decode`` get their next
        token in time."""
        s = self.slots
        budget = self.budget
        if budget is None or not len(decode):
            return self.max_tokens
        rows = s.running[self.need(s.running) > 1]
        lacking = s.known[rows] - s.computed[rows]
        longest = int(lacking.max(initial=0))
        for seq in self.waiting.heads() if self.n_waiting else ():
            longest = max(longest, seq.known)
        context = int(s.computed[rows].max(initial=0))
        most = budget.most(len(decode), context, longest or 1)
        divides = self.images is not None and self.images.dividing
        return max(most // 2, 1) if divides else most

    def _spare(self, budget: int, most: int) -> int:
        """Return how many of ``budget`` prompt tokens to reserve for a short waiting prompt, 0 for none.

        Where time limits a step to ``most`` prompt tokens, a short prompt would otherwise wait until all steps of a
        long prompt have run."""
        if most >= self.max_tokens or not self.n_waiting:
            return 0
        least = min(seq.known for seq in self.waiting.heads())
        return least if 4 * least <= budget else 0

    def need(self, run: np.ndarray) -> np.ndarray:
        """Return how many tokens each running row has to compute; 0 if the row must wait.  ``run`` has the slots of the
        rows."""
        s = self.slots
        may = s.ready[run] & (s.known[run] < s.end[run])
        upto = s.schedulable[run]
        if self.compression is not None:
            upto = self.compression.upto(s, run, upto)
        return (upto - s.computed[run]) * may

    def _decode(self, need: np.ndarray) -> np.ndarray:
        """Return the slots of the rows that lack one computed token, after taking the blocks for it.

        Rows are preempted if blocks are missing.  ``need`` has the number of tokens that each running row has to
        compute."""
        s = self.slots
        rows = s.running[need == 1][: self.max_tokens]
        missing = self.cache.missing(rows, s.computed[rows] + 1)
        if not np.count_nonzero(missing):
            return rows
        while np.count_nonzero(missing) and not self.cache.can_take(missing):
            lacking = rows[missing.any(axis=0)]
            newest = lacking[np.argmax(s.id[lacking])]
            gone = self.make_room(int(newest), int(missing.sum()))
            left = rows == gone
            left |= s.partner[rows] == gone  # partners leave together
            left |= s.serial[rows] < 0
            rows = rows[~left]
            missing = missing[:, ~left]
        self.cache.grow(rows, missing)
        return rows

    def make_room(self, requester: int, need: int) -> int:
        """Preempt one row to free ``need`` blocks for the row ``requester``, and return the slot that leaves this step.

        The returned slot is the victim, or the requester itself.  The requester is preempted unless its age or its
        number of preemptions protects it; a protected requester only waits.
        """
        s = self.slots
        oldest = self.slots.id[self.slots.running].min()
        victim = self.preempt_one_of(s.running, need)
        unreserved = len(self.cache.pools) > 1 or self.cache.compacts
        if victim is None and s.id[requester] == oldest and unreserved:
            # Blocks of a sliding window, and blocks for kept tokens of a compression, are not
            # reserved ahead of time. So rows that are otherwise protected may be preempted for
            # them.
            victim = self.preempt_one_of(s.running, need, True)
        if victim is not None:
            return victim
        rarely = s.preempted[requester] < PROTECTED_AFTER
        if s.id[requester] != oldest and (rarely or s.beam[requester]):
            self.preempt(requester)
        return requester

    def preempt_one_of(self, rows: np.ndarray, need: int, protected: bool = False) -> int | None:
        """Preempt the row of ``rows`` that the policy selects, and return its slot; None if no row may be preempted.
        Candidates belong to the owner with most of the rows.  ``protected`` allows rows that were preempted often."""
        s = self.slots
        oldest = s.id[s.running].min()  # all beams of a request have the same id
        rows = rows[s.id[rows] != oldest]
        if not protected:
            # Rows that wait to fork, and beams, may be preempted any number of times, because no
            # blocks were reserved for their branches.
            rarely = s.preempted[rows] < PROTECTED_AFTER
            rows = rows[rarely | s.forking[rows] | s.beam[rows]]
        if not len(rows):
            return None
        if self.shared:
            rows = of_the_largest(s, rows)
        selected = self.ask(self.policy.victim, s.view(rows), need)
        index = checks.whole(selected, 0, len(rows) - 1, "victim() gave")
        victim = int(rows[index])
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
            # The device can keep the row's columns only if it has received the row.
            unsent = (*self.joins, *self.forks)
            if all(other is not seq for *_, other in unsent):
                self.keeps.append((seq.slot, seq.id))
                seq.saved = True
            for one in seq.pair:
                one.preempted += 1
                self.leave(one.slot)
                one.status = WAITING
        self.events.sequence_preempted(seq)
        self.requeue(seq)

    def requeue(self, seq: Seq) -> None:
        """Queue a preempted sequence again, unless it is in a step in flight.

        The sequence ends with an error if the scheduling policy raises for it.  All beams of a request are one entry of
        the queue, and so are a sequence and its guide."""
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
            who = type(self.policy).__name__
            why = describe_error(e, self.policy)
            self.finish(seq, "error", error=f"scheduler {who} failed on it: {why}")

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
        # the token was chosen for this row, not for the next one in the slot
        self.chosen = [choice for choice in self.chosen if choice[0] != slot]
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
        several = need > 1
        rows = s.running[several]
        need = need[several]
        if not len(rows):
            return decode
        oldest = s.id[s.running].min()
        for slot, want in zip(rows.tolist(), need.tolist(), strict=True):
            if parts.left <= 0:
                break
            if s.seq[slot] is None:
                continue  # it was preempted to free blocks for the oldest row
            owner_number = int(s.owner_number[slot])
            have = chunks.get(slot, 0)
            next_tokens = self.encoded(slot, want)
            more = min(next_tokens - have, parts.most(owner_number))
            if more <= 0:
                continue  # the row's owner has used up its part of the budget
            chunk = self._grow_chunk(slot, have + more)
            while not chunk and s.id[slot] == oldest:
                if self.make_room(slot, 1) == slot:
                    break
                decode = decode[s.serial[decode] >= 0]
                gone = [planned for planned in chunks if s.seq[planned] is None]
                for left in gone:
                    tokens = chunks.pop(left)
                    parts.spend(int(s.owner_number[left]), -tokens)
                most = min(want, parts.most(owner_number))
                chunk = self._grow_chunk(slot, most)
            if chunk:
                chunks[slot] = chunk
                parts.spend(owner_number, chunk - have)
        return decode

    def encoded(self, slot: int, tokens: int) -> int:
        """Return how many of the next ``tokens`` tokens of a row the step may compute, with regard to its images.

        A step with decoding rows (``encodes_apart``) computes no image tokens whose features are missing.  An earlier
        step computes the features, so that decoding rows never wait for features and for the image's tokens in one
        step."""
        if not self.encodes_apart or self.images is None:
            return tokens
        seq = self.slots.at(slot)
        return min(tokens, self.images.encoded_tokens(seq, int(self.slots.computed[slot])))

    def _steps_of(self, rows: int, tokens: int) -> int:
        """Return the number of steps with ``rows`` decoding rows that compute the features of an image with ``tokens``
        tokens."""
        return 1 if self.budget is None else self.budget.steps_of(rows, tokens)

    def room(self, slot: int, chunk: int, promised: int = 0) -> tuple[int, int]:
        """Return (tokens, blocks) for a row's next chunk as ``KVCache.room`` does, but without cutting an image whose
        tokens attend to each other.

        The chunk may be longer than ``chunk`` to contain such an image as a whole."""
        if self.images is None or not self.images.undivided:
            return self.cache.room(slot, chunk, promised)
        request = self.slots.at(slot).request
        first = int(self.slots.computed[slot])
        wanted = whole_images(request, first, chunk, extend=True)
        tokens, blocks = self.cache.room(slot, wanted, promised)
        if tokens < wanted:
            fitting = whole_images(request, first, tokens, extend=False)
            tokens, blocks = self.cache.room(slot, fitting, promised)
        return tokens, blocks

    def _grow_chunk(self, slot: int, chunk: int) -> int:
        """Take the blocks for a row's next ``chunk`` tokens, or for as many as fit, and return the number of tokens
        with blocks."""
        fitting, _ = self.room(slot, chunk)
        return self.cache.grow_chunk(slot, fitting)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def _make_plan(
        self, decode: np.ndarray, chunks: dict[int, int], budget: int
    ) -> StepPlan | None:
        """Build the step from the decoding slots and the chunks (slot -> tokens), or return None if it has no rows.

        Draft tokens use the rest of ``budget``.
        """
        s = self.slots
        prompt_tokens = sum(chunks.values())
        n, waits = self._drafts(decode, prompt_tokens, budget)
        draft = NO_DRAFTS
        if n.any():
            decode, n, draft = with_drafts(decode, n)
        else:
            n = NO_DRAFTS
        at, q_len, draft = step_rows(decode, n, draft, chunks)
        if not len(at):
            return None
        if self.images is not None:
            self.images.reach(s, at, q_len)
            if self.encodes_apart:
                left = self.most_tokens - prompt_tokens
                self.images.encode_next(s, left, partial(self._steps_of, len(decode)))
        delta = take_delta(self)
        computed = s.computed[at]
        if len(draft):
            computed += draft
        # a row with drafts appears several times; the number of its last appearance is stored
        s.computed[at] = after = computed + q_len
        slack = s.slack[at]
        draws = self._draw(at, after, draft, waits)
        columns = requested_columns(s, at, computed, q_len, draws)
        if self.compression is not None:
            columns |= self.compression.observe(s, at, computed, q_len)
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
            **columns,
        )
        self.steady = steady_of(self, plan, at)
        self.drafted = steady_drafts_of(self, plan, at)
        return plan

    def _draw(
        self, at: np.ndarray, after: np.ndarray, draft: np.ndarray, waits: bool
    ) -> np.ndarray:
        """Return bool [R], True for the rows of a step that draw a token, and count these tokens as known.

        ``at`` i64 [R] are the slots of the step's rows, ``after`` i32 [R] their computed tokens after the step, and
        ``draft`` numbers their drafts, empty without drafts.  With ``waits``, rows that may have drafts are not planned
        until the result of this step."""
        s = self.slots
        draws = after == s.known[at]
        if s.pooling:
            draws &= ~s.pooled[at]
        drafts = draft > 0
        if len(draft):
            draws |= drafts
        drawn = at[draws]
        s.known[drawn] = s.schedulable[drawn] = s.known[drawn] + 1
        if waits:
            speculating = drawn[s.speculates[drawn]]
            s.ready[speculating] = False
        if len(draft):
            mine = at[drafts]
            # The count includes all drafts as if accepted; ``Publisher._take_back`` lowers it.
            s.known[mine] = s.schedulable[mine] = after[drafts] + 1
            # if a slot appears several times, its last row counts
            s.slack[mine] = (s.slack[at] + draft)[drafts]
        return draws

    def _drafts(self, decode: np.ndarray, prompt: int, budget: int) -> tuple[np.ndarray, bool]:
        """Return the number of drafts i32 of each decoding row, and whether rows that may have drafts must wait for the
        result of the step.  ``prompt`` is the number of prompt tokens of the step, and ``budget`` limits the drafts."""
        s = self.slots
        spec = self.speculation
        if spec is None or budget <= 0:
            return NO_DRAFTS, False
        most = spec.most_drafts(len(decode), prompt)
        if not most:
            return NO_DRAFTS, False
        ahead = spec.ahead and not (s.tapping or s.paired or s.asking or s.pooling)
        return spec.drafts(s, self.cache, decode, most, budget, ahead), not ahead
