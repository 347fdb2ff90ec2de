"""A device without a model, which takes the time of a model, makes up tokens, and can check every KV slot that is read.

    submit ──► behind ──► delta ─ FORWARD ─┬─ SAMPLE ──► running ──► collect
                            the device's   │  when its masks have arrived
                            clock advances └─ supply

Scheduling, caching, HTTP and text are those of the real engine, so they can be measured and tested without a GPU and
without weights.  Tokens are functions of the history (``made_up``), so a request always has the same answer.  Sampling
parameters that shape a distribution have no effect.  Processors do not run, so a request that binds one (``bad_words``,
penalties, ``logit_bias`` ...) ends with an error.

With ``check`` each KV slot holds a hash of the tokens up to it, and every step of a row checks that all slots that it
reads hold the row's *own* history.  A wrong block, a missing copy, a block that is reused too early or a stale table
entry raises AssertionError.  The error ends the engine, because its tables are wrong.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minivllm import files
from minivllm.core.interfaces.executor import Capacity, Executor, Wiring
from minivllm.core.interfaces.plan import (
    ENDED,
    EOS,
    FAILED,
    LENGTH,
    OVERSHOOT,
    STOP_ID,
    STOP_IDS,
    Delta,
    Join,
    LateInputs,
    LogProbs,
    StepError,
    StepPlan,
    StepResult,
    no_rows,
)
from minivllm.core.mover import Mover
from minivllm.errors import ModelError, ResourceError
from minivllm.validation import merge

from .clocks import CLOCKS
from .costs import PAUSE, StepCounter, read_costs
from .made_up import Histories, MadeUpModel, mixed, scores_of, uniform
from .options import SimOptions
from .sim_pages import sim_mover
from .sim_states import SimStates, checkpoints_of

MOST_BLOCKS = 1 << 31  # limit, because block numbers have 32 bits
MADE_UP = "tokens are made up: no model is computed"
DRAFT_LANE = np.uint64(0xE7037ED1A0B428DB)


@dataclass
class SimStep:
    """A simulated step after its FORWARD, before or after its tokens are drawn."""

    plan: StepPlan
    ms: float  # that it takes
    result: StepResult | None = None  # None until the token masks of the step have arrived
    done: float = 0.0  # end of the step on the device's clock, in seconds


class Sim(Executor):
    """The simulated device.

    Subclasses plant faults, or change which token a row draws (``_next``) and when it ends (``_commit``).
    """

    threaded = True  # whether threads call the stores of KV pages
    observed = 0  # how many of the last tokens' queries a compressor reads; reading is not simulated
    sums = False  # whether a compressor reads attention sums
    # window of each KV group; None if the block tables show windows by missing entries
    windows: tuple[int | None, ...] | None = None

    def __init__(self, options: Any = None) -> None:
        super().__init__(SimOptions() if options is None else options)
        self.clock: Any = CLOCKS[self.options.clock]()
        self.costs = read_costs(self.options.costs) if self.options.costs else None
        # Clock of the engine; None means the real one. Replays of traces set another one.
        self.now = None if self.options.clock == "real" else self.clock.now
        # slot -> salt of its KV cache; all slots whose KV a row reads must have the same salt
        self.space: Callable[[int], object] = lambda slot: ()
        self._behind: deque[StepPlan] = deque()  # a step that waits for its token masks, and the steps after it
        self._early: dict[int, LateInputs] = {}  # id of a step in ``_behind`` -> its token masks
        self._running: deque[SimStep] = deque()  # submitted steps in order; all but the last have drawn their tokens
        self._counter = StepCounter()  # computes the counts of steps from which their time follows
        self._free_at = 0.0  # time at which the device will have done all submitted work
        self._started = False
        self.states: SimStates | None = None  # simulated recurrent states, or None if they are not checked
        self.mover: Mover | None = None  # copies KV pages between the device and the tiers
        # Of compressed rows: (KV group, slot) -> positions i64 of the tokens that the KV cache still holds.
        self.held: dict[tuple[int, int], np.ndarray] = {}

    def start(self, wiring: Wiring) -> Capacity:
        vocab = self.options.vocab_size or _vocab_of(wiring.model_dir, wiring.hf_overrides)
        blocks = self._blocks(wiring)
        s = wiring.max_num_seqs
        length = wiring.max_model_len
        eos = next((i for i in wiring.eos_ids if i < vocab), -1)
        self.model = MadeUpModel(vocab, eos, self.options.answer_tokens)
        self.text = self._histories(s, length)
        self.known, self.end, self.min_end, self.sample = np.zeros((4, s), np.int64)
        self.stop_ids = np.full((s, STOP_IDS), -1, np.int32)
        self.n_eos = np.zeros(s, np.int32)
        self.stopped = np.ones(s, bool)
        # Slot -> name of the logits processor that its request uses and that cannot be simulated.
        self.refused: dict[int, str] = {}
        self.processors = [part.name for part in wiring.processors]
        self.block = wiring.block
        checkpoints = checkpoints_of(wiring)
        self.states = None
        if self.options.check:
            kv = self.kv = self._checked_blocks(blocks, wiring.block)
            columns = length // wiring.block + 2
            self.table = np.zeros((len(blocks), s, columns), np.int32)
            if checkpoints is not None:
                drafts = wiring.speculation.num_speculative_tokens
                self.states = SimStates(s, checkpoints, drafts)
        else:
            # unless contents are checked, a block has no content, and a page has 8 bytes
            kv = [np.zeros((n, 1), np.uint64) for n in blocks]
        self.mover = sim_mover(wiring, kv, self.states, self.threaded)
        self._started = True
        depth = 1 if wiring.steps.run_ahead is None else wiring.steps.run_ahead
        block_bytes = (1,) * len(blocks)
        return Capacity(
            blocks,
            block_bytes,
            vocab,
            0,
            depth,
            notes=(MADE_UP,),
            guides=True,
            checkpoints=checkpoints,
            compresses=self.observed,
            drafts_ahead=True,
            sums=self.sums,
        )

    def _blocks(self, wiring: Wiring) -> tuple[int, ...]:
        """Return the number of blocks of each KV group, including the null block.

        By default the cache has room for ``max_num_seqs`` rows of ``max_model_len`` tokens."""
        n = wiring.cache.num_kvcache_blocks + 1
        if wiring.cache.num_kvcache_blocks < 0:
            n = wiring.max_num_seqs * (wiring.max_model_len // wiring.block + 1) + 1
        if n >= MOST_BLOCKS:
            raise ResourceError(f"num_kvcache_blocks={n - 1}: expected fewer than {MOST_BLOCKS - 1}")
        return (n,) * max(len(wiring.cache.groups), 1)

    @staticmethod
    def _checked_blocks(blocks: Sequence[int], size: int) -> list[np.ndarray]:
        """Return the content u64 [blocks, size] of each KV group for the check.  Raise ResourceError if it does not fit
        into memory."""
        try:
            return [np.zeros((n, size), np.uint64) for n in blocks]
        except (MemoryError, ValueError) as e:
            raise ResourceError(f"sim: its check of {max(blocks)} KV blocks does not fit into memory") from e

    def _histories(self, slots: int, length: int) -> Histories:
        return Histories(slots, length)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        self._behind.append(plan)
        self._enqueue()

    def _enqueue(self) -> None:
        while self._behind and (not self._running or self._running[-1].result is not None):
            plan = self._behind.popleft()
            self._delta(plan.delta)
            if len(plan.slack):
                plan = self._settled(plan)
            ms = self._cost(plan)
            self._work(ms)
            self._running.append(SimStep(plan, ms + self.options.sample_ms))
            late = self._early.pop(plan.id, None)
            if late is not None or not len(plan.late):
                self._sample(self._running[-1], late)

    def _settled(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the exact numbers of tokens in place of upper bounds."""
        exact = self.known[plan.slots] - 1
        if len(plan.draft):
            exact += plan.draft
        computed = np.where(plan.slack > 0, exact, plan.computed)
        return replace(plan, computed=computed.astype(np.int32), slack=no_rows())

    def supply(self, step: int, late: LateInputs) -> None:
        if any(plan.id == step for plan in self._behind):
            self._early[step] = late
            return
        self._sample(next(r for r in self._running if r.plan.id == step), late)
        self._enqueue()

    def _cost(self, plan: StepPlan) -> float:
        """Return how many milliseconds the FORWARD of a step takes."""
        o = self.options
        if self.costs is not None:
            counts = self._counter.count(plan, wake=self.wakes())
            return 1e3 * self.costs.seconds(counts)
        return o.step_ms + o.row_ms * len(plan.slots) + o.token_ms * int(plan.q_len.sum())

    def wakes(self) -> bool:
        """Return whether a step that begins now follows a pause."""
        return not self._running and self.clock.now() - self._free_at > PAUSE

    def _work(self, ms: float) -> None:
        """Keep the device busy for some milliseconds, from now or from the end of its last work."""
        self._free_at = max(self.clock.now(), self._free_at) + ms / 1e3

    def _sample(self, step: SimStep, late: LateInputs | None) -> None:
        self._work(self.options.sample_ms)
        step.result = result = self._run(step.plan, late, step.ms)
        if self.costs is not None and self.costs.slopes["end"]:
            ended = int(np.count_nonzero(result.flags & ENDED))
            self._work(1e3 * self.costs.slopes["end"] * ended)
        step.done = self._free_at

    def collect(self, in_flight: int) -> Sequence[StepResult]:
        out: list[StepResult] = []
        while self._running and (step := self._running[0]).result is not None:
            if len(self._running) + len(self._behind) <= in_flight and not self._finished(step):
                break
            self.clock.until(step.done)
            self._running.popleft()
            out.append(step.result)
        return out

    def _finished(self, step: SimStep) -> bool:
        return step.done <= self.clock.now()

    def alive(self) -> bool:
        return self._started

    def stop(self, deadline: float = 10.0) -> None:
        for waiting in (self._running, self._behind, self._early):
            waiting.clear()
        self._started = False
        if self.mover is not None:
            self.mover.close()
            self.mover = None

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        if verb == "kv_tiers" and self.mover is not None:
            return [self.mover.answer(args or {})]
        return super().call(verb, args)

    # ---- columns -------------------------------------------------------------------------------------------------

    def _delta(self, d: Delta) -> None:
        if self.mover is not None and len(d.store):
            self.mover.store(d.store)
        self.stopped[d.leave] = True
        if d.join is not None:
            self._join(d.join)
        for source, slot, sample in d.fork.tolist():
            for column in (self.known, self.end, self.min_end, self.n_eos, self.stop_ids):
                column[slot] = column[source]
            self.text.fork(source, slot, int(self.known[source]))
            self.sample[slot] = sample
            self.stopped[slot] = False
            self._refuse(slot, self.refused.get(source))
            for g in range(len(getattr(self, "kv", ()))):
                if (g, source) in self.held:
                    self.held[g, slot] = self.held[g, source]
                else:
                    self.held.pop((g, slot), None)
        for slot, token in d.token.tolist():
            self._append(np.array([slot]), np.array([token]))
        if self.options.check:
            self._tables(d)
        if self.states is not None:
            self.states.apply(d)
        if self.mover is not None and len(d.fill):
            self.mover.fill(d.fill)
        if self.options.check and len(d.compact):
            self._compact(d)

    def _join(self, j: Join) -> None:
        slots = j.slot
        self.known[slots] = j.known
        self.end[slots] = j.end
        self.min_end[slots] = j.min_end
        self.sample[slots] = j.sample
        self.n_eos[slots] = j.n_eos
        self.stop_ids[slots] = j.stop_ids
        self.stopped[slots] = False
        histories = np.split(j.tokens, np.cumsum(j.known)[:-1])
        for i, slot in enumerate(slots.tolist()):
            self.text.put(slot, histories[i])
            for key in [key for key in self.held if key[1] == slot]:
                del self.held[key]
            self._refuse(slot, self._bound_to(j, i))

    def _bound_to(self, j: Join, i: int) -> str | None:
        """Return the name of the first logits processor that sequence ``i`` of a join uses, or None."""
        for name, rows in zip(self.processors, j.bound, strict=False):
            if i in rows:
                return name
        return None

    def _refuse(self, slot: int, processor: str | None) -> None:
        if processor is not None:
            self.refused[slot] = processor
        else:
            self.refused.pop(slot, None)

    def _append(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        self.text.append(slots, self.known[slots], tokens)
        self.known[slots] += 1

    # ---- what rows draw ------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, late: LateInputs | None, ms: float) -> StepResult:
        """Draw the tokens of a step after its FORWARD, check the step if ``check`` is set, and return its result.

        ``ms`` is the device time that the result reports.
        """
        if self.options.check:
            self._check_plan(plan)
        drafts = self._draft(plan) if len(plan.draft) else None
        prompt = self._prompt_scores(plan) if len(plan.prompt) else None
        if self.options.check:
            self._check_caches(plan)
        n = len(plan.samples)
        slots = plan.slots[plan.samples]
        scored = plan.topk >= 0
        before = np.empty(0, np.uint64)  # hashes of the histories of drawn tokens, if their scores or logits are needed
        if scored or len(plan.host) or len(plan.late):
            after = plan.computed + plan.q_len
            before = self.text.prefix[slots, after[plan.samples]]
        tokens = np.zeros(n, np.int32)
        count = np.zeros(n, np.int32)
        over = self.stopped[slots]
        errors: tuple[StepError, ...] = ()
        flags = over.astype(np.uint8) * np.uint8(OVERSHOOT)
        if drafts is not None:
            later = plan.draft[plan.samples] > 0
            over = over | later
            flags[later] = 0
        rows = np.flatnonzero(~over)
        if self.refused:
            rows, errors = self._failed(slots, rows, flags)
        tokens[rows] = self._next(slots[rows])
        if late is not None:
            self._mask(plan, late, before, tokens)
        guided = self._guide(plan, late, tokens) if len(plan.guided) else None
        if len(plan.host) or len(plan.held):  # the host chooses the tokens of these rows
            chosen = np.concatenate([plan.host, plan.held])
            rows = np.setdiff1d(rows, chosen)
        count[rows] = 1
        flags[rows] = self._commit(slots[rows], tokens[rows])
        drafted = no_rows()
        if drafts is not None:
            drafted, draft_tokens = drafts
            self._accept(plan, draft_tokens, tokens, count, flags)
        scores = self.model.scores(before, tokens, plan.topk) if scored else None
        if scores is not None and guided is not None:
            scores = scores_of(scores, plan.guided[:, 0], guided, tokens)
        logits = self.model.logits(before[plan.host])
        return StepResult(plan.id, slots, tokens, count, flags, scores, prompt, logits, errors, ms, drafted)

    def _check_caches(self, plan: StepPlan) -> None:
        """Check the content of the KV cache and of the recurrent states that the rows of a step read, and write the new
        content."""
        live = ~self.stopped[plan.slots]
        for row in np.flatnonzero(live).tolist():
            slot = int(plan.slots[row])
            self._read_and_write(slot, int(plan.q_len[row]), int(plan.computed[row]))
        if self.states is not None:
            self.states.step(plan, live, self.text.prefix)

    def _next(self, slots: np.ndarray) -> np.ndarray:
        """Return the token that each of these rows draws, i64.

        Rows below ``min_tokens`` draw no token that would end them.
        """
        h = self.text.prefix[slots, self.known[slots]]
        tokens = self.model.draw(h, self.sample[slots])
        early = np.flatnonzero(self.known[slots] < self.min_end[slots])
        if not len(early):
            return tokens
        ends = self.stop_ids[slots[early]] == tokens[early][:, None]
        best = np.arange(min(STOP_IDS + 1, self.model.vocab))
        for i in early[ends.any(1)].tolist():
            ranked = self.model.at_rank(h[i : i + 1], best)
            allowed = ranked[~np.isin(ranked, self.stop_ids[slots[i]])]
            if len(allowed):
                tokens[i] = allowed[0]
        return tokens

    def _guide(self, plan: StepPlan, late: LateInputs | None, tokens: np.ndarray) -> np.ndarray:
        """Draw the tokens of rows with a guide, and return the logits f32 [n, V] from which they are drawn.

        The most likely token becomes the token of the row and of its guide.
        """
        rows, guides = plan.guided.T
        slots = plan.slots[plan.samples]
        at = self.text.prefix[slots, self.known[slots]]
        own = self.model.logits(at[rows])
        other = self.model.logits(at[guides])
        found = plan.scale[:, None] * (own - other) + other
        for logits, row, guide in zip(found, rows.tolist(), guides.tolist(), strict=True):
            slot = slots[row]
            may = np.ones(len(logits), bool)
            if self.known[slot] < self.min_end[slot]:
                ids = self.stop_ids[slot]
                valid = (ids >= 0) & (ids < len(logits))
                may[ids[valid]] = False
            for mask in late.mask[plan.late == row] if late is not None else ():
                octets = mask.astype("<i4").view(np.uint8)
                bits = np.unpackbits(octets, bitorder="little")
                may &= bits[: len(logits)] > 0
            allowed = np.where(may, logits, -np.inf)
            tokens[[row, guide]] = allowed.argmax()
        return found

    def _mask(self, plan: StepPlan, late: LateInputs, before: np.ndarray, tokens: np.ndarray) -> None:
        for j, i in enumerate(plan.late.tolist()):
            words = late.mask[j]
            token = int(tokens[i])
            if not words[token >> 5] >> (token & 31) & 1:
                tokens[i] = self.model.likeliest(before[i], words)

    def _commit(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Append these tokens to the rows in these slots, and return for each row the flags u8 that tell whether it has
        ended."""
        n = self.known[slots]
        self._append(slots, tokens)
        flags = np.zeros(len(slots), np.uint8)
        flags[n + 1 >= self.end[slots]] = LENGTH
        may_stop = self.stop_ids[slots, 0] >= 0
        may_stop &= n >= self.min_end[slots]
        some = np.flatnonzero(may_stop)
        if len(some):
            at = slots[some]
            stop = self.stop_ids[at] == tokens[some][:, None]
            is_eos = np.arange(STOP_IDS) < self.n_eos[at][:, None]
            eos = (stop & is_eos).any(1)
            flags[some[stop.any(1) & ~eos]] |= STOP_ID
            flags[some[eos]] |= EOS
        self.stopped[slots] = flags != 0
        return flags

    def _failed(
        self, slots: np.ndarray, rows: np.ndarray, flags: np.ndarray
    ) -> tuple[np.ndarray, tuple[StepError, ...]]:
        """Return the indices of the rows that use no logits processor which cannot be simulated, and an error for the
        other rows."""
        by: dict[str, list[int]] = {}
        bad: list[int] = []
        for i in rows.tolist():
            name = self.refused.get(int(slots[i]))
            if name is not None:
                by.setdefault(name, []).append(i)
                bad.append(i)
        flags[bad] = FAILED
        self.stopped[slots[bad]] = True
        message = "made-up tokens pass no processor; leave out what asks for it, or use another executor"
        errors = []
        for name, some in by.items():
            errors.append(StepError("rows", f"executor sim: {name}", message, tuple(some)))
        return np.setdiff1d(rows, bad), tuple(errors)

    def _prompt_scores(self, plan: StepPlan) -> LogProbs:
        each, counts = plan.prompt.T
        rows = np.repeat(each, counts)
        ahead = [np.arange(1, count + 1) for count in counts.tolist()]
        at = plan.computed[rows] + np.concatenate(ahead)
        slots = plan.slots[rows]
        before = self.text.prefix[slots, at]
        return self.model.scores(before, self.text.tokens[slots, at], plan.prompt_topk)

    def _draft(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Write drafts to the histories, of which the share ``drafts_accepted`` is right.

        Return the number of drafts of each speculating row, i32, and the token of each row of the plan that is a draft,
        i64 [R].
        """
        tokens = np.zeros(len(plan.slots), np.int64)
        for level in range(1, int(plan.draft.max()) + 1):
            rows = np.flatnonzero(plan.draft == level)
            slots = plan.slots[rows]
            at = plan.computed[rows]
            h = self.text.prefix[slots, at]
            noise = uniform(mixed(h ^ DRAFT_LANE))
            wrong = noise >= self.options.drafts_accepted
            right = self.model.draw(h, self.sample[slots])
            tokens[rows] = (right + wrong) % self.model.vocab
            self.text.append(slots, at, tokens[rows])
        following = np.append(plan.draft[1:], 0)
        last = (plan.draft > 0) & (following == 0)
        return plan.draft[last], tokens

    def _accept(
        self,
        plan: StepPlan,
        draft_tokens: np.ndarray,
        tokens: np.ndarray,
        count: np.ndarray,
        flags: np.ndarray,
    ) -> None:
        """Draw the tokens of rows with drafts, in the order of the draft numbers.

        A row draws if its draft equals the token drawn before it, and if all earlier drafts were right.
        ``draft_tokens`` i64 [R] has the token of each row of the plan that is a draft.
        """
        level = plan.draft[plan.samples]
        for draft in range(1, int(level.max(initial=0)) + 1):
            rows = np.flatnonzero(level == draft)
            of_plan = plan.samples[rows]
            slots = plan.slots[of_plan]
            at = plan.computed[of_plan]
            holds = ~self.stopped[slots]
            holds &= self.known[slots] == at + 1
            holds &= self.text.tokens[slots, at] == draft_tokens[of_plan]
            rows = rows[holds]
            slots = slots[holds]
            tokens[rows] = self._next(slots)
            count[rows] = 1
            flags[rows] = self._commit(slots, tokens[rows])

    # ---- check ---------------------------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        first = np.ones(len(plan.slots), bool)
        if len(plan.draft):
            first = plan.draft == 0
        slots = plan.slots[first]
        assert len(set(slots.tolist())) == len(slots), "a slot twice in a step, and not for a draft"
        several = plan.q_len > 1
        assert (plan.q_len > 0).all(), "a row computes at least one token"
        assert (several[1:] >= several[:-1]).all(), "one-token rows come first"
        rows = plan.samples[first[plan.samples]]
        slots = plan.slots[rows]
        known = self.known[slots]
        due = (plan.computed + plan.q_len)[rows]
        off = ~self.stopped[slots] & (known != due)
        assert not off.any(), f"rows {rows[off]} draw after {due[off]} tokens, and have {known[off]}"
        for row in (np.flatnonzero(plan.draft == 1) - 1).tolist():
            self._check_drafts(plan, row)

    @staticmethod
    def _check_drafts(plan: StepPlan, row: int) -> None:
        """Raise AssertionError unless the drafts of plan row ``row`` follow it in order."""
        assert row >= 0, "the first row of a step is a draft"
        slot = int(plan.slots[row])
        n = np.count_nonzero(plan.slots == slot)
        drafts = plan.draft[row : row + n]
        positions = plan.computed[row : row + n]
        order = np.arange(n)
        assert np.array_equal(drafts, order), "drafts of a row stand apart"
        consecutive = np.array_equal(positions, positions[0] + order)
        assert consecutive, f"drafts of slot {slot} for positions {positions + 1}"

    def _tables(self, d: Delta) -> None:
        where = d.table[:, :3]
        assert len(np.unique(where, axis=0)) == len(where), "a table entry is named twice in one delta"
        self.table[tuple(where.T)] = d.table[:, 3]
        for g, slot, first, count in d.trim.tolist():
            self.table[g, slot, first : first + count] = 0
        for g, kv in enumerate(self.kv):
            _, sources, targets = d.copy[d.copy[:, 0] == g].T
            assert len(set(targets.tolist())) == len(targets), "two copies to one block in one delta"
            # all sources are read before a target is written, because a target may be a source
            kv[targets] = kv[sources]

    def _own(self, slot: int, tokens: int) -> np.ndarray:
        """Return the content u64 [tokens] that the KV cache must have at each position of a row."""
        space = zlib.crc32(repr(self.space(slot)).encode())
        return self.text.prefix[slot, 1 : tokens + 1] ^ np.uint64(space)

    def _compact(self, d: Delta) -> None:
        """Check the KV content of each compressed row, keep a random choice of its tokens, and move them to its new
        blocks.
        """
        sources = d.sources.tolist()
        for g, slot, stored, kept, computed in d.compact.tolist():
            used = -(-stored // self.block)
            blocks = np.array(sources[:used])
            sources = sources[used:]
            if self.stopped[slot]:
                continue  # the sequence has ended, which the host has not seen when it planned the step
            positions = self.held.get((g, slot), np.arange(computed))
            assert len(positions) == stored, f"slot {slot} stores {len(positions)} tokens, the delta says {stored}"
            at = np.arange(stored)
            content = self.kv[g][blocks[at // self.block], at % self.block]
            own = self._own(slot, computed)[positions]
            assert (content == own).all(), f"group {g}: foreign KV of slot {slot} is compressed"
            draw = np.random.default_rng([slot, computed])
            chosen = np.sort(draw.permutation(stored)[:kept])
            to = np.arange(kept)
            new = self.table[g, slot, to // self.block]
            assert (new > 0).all(), f"group {g} slot {slot}: a kept token has no block"
            self.kv[g][new, to % self.block] = content[chosen]
            self.held[g, slot] = positions[chosen]

    def _read_and_write(self, slot: int, q: int, computed: int) -> None:
        """Check the KV content that a step reads for the row in a slot, in all groups, and write that of its ``q`` new
        tokens."""
        own = self._own(slot, computed + q)
        for g, kv in enumerate(self.kv):
            positions = np.arange(computed + q)
            compressed = (g, slot) in self.held
            if compressed:
                positions = np.concatenate([self.held[g, slot], positions[computed:]])
                self.held[g, slot] = positions
            stored = len(positions) - q
            at = np.arange(len(positions))
            blocks = self.table[g, slot, at // self.block]
            inside = at % self.block
            reads = np.arange(stored)
            if compressed:
                pass  # a compressed row reads all tokens that are stored
            elif self.windows is not None:
                window = self.windows[g]
                reads = reads[0 if window is None else max(0, computed - window + 1) :]
            else:
                reads = reads[blocks[:stored] > 0]
            missing = reads[blocks[reads] <= 0]
            if len(missing):
                raise AssertionError(f"group {g} slot {slot}: position {missing[0]} has no block")
            content = kv[blocks[reads], inside[reads]]
            foreign = reads[content != own[positions[reads]]]
            if len(foreign):
                raise AssertionError(f"group {g}: KV of another history at {foreign[0]} of slot {slot}")
            missing = at[stored:][blocks[stored:] <= 0]
            if len(missing):
                raise AssertionError(f"group {g} slot {slot}: position {missing[0]}, which is written, has no block")
            kv[blocks[stored:], inside[stored:]] = own[positions[stored:]]


def _vocab_of(model_dir: str, overrides: Mapping[str, Any]) -> int:
    """Return the vocabulary's size in config.json.  ModelError if there is none."""
    path = Path(model_dir) / "config.json"
    if not files.is_there(path):
        raise ModelError(
            f"{model_dir}: has no config.json; expected a model directory, or vocab_size of the executor sim"
        )
    raw: Any = merge(files.read_json(path, files.PART, ModelError), overrides)
    of_text = raw.get("text_config") or {}
    found = raw.get("vocab_size", of_text.get("vocab_size"))
    if not isinstance(found, int) or found < 1:
        raise ModelError(f"{path}: has no vocab_size; set it as an option of the executor sim")
    return found
