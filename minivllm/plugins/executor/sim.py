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

MOST_BLOCKS = 1 << 31  # block numbers have 32 bits
MADE_UP = "tokens are made up: no model is computed"
DRAFT_LANE = np.uint64(0xE7037ED1A0B428DB)


@dataclass
class SimStep:
    """A step after its FORWARD."""

    plan: StepPlan
    ms: float  # that it takes
    result: StepResult | None = None  # None if the masks have not arrived
    done: float = 0.0  # end of the step on the device's clock, in seconds


class Sim(Executor):
    """The simulated device.

    Subclasses plant faults, or change which token a row draws (``_next``) and when it ends (``_commit``).
    """

    threaded = True  # whether threads call the stores of tiers
    observed = 0  # number of last tokens whose queries a compressor reads, which is not simulated
    sums = False  # whether a compressor reads attention sums
    # window of each KV group; None if the block tables show windows by missing entries
    windows: tuple[int | None, ...] | None = None

    def __init__(self, options: Any = None) -> None:
        super().__init__(SimOptions() if options is None else options)
        self.clock: Any = CLOCKS[self.options.clock]()
        self.costs = read_costs(self.options.costs) if self.options.costs else None
        # None means the real clock, which the engine uses; replays set another one
        self.now = None if self.options.clock == "real" else self.clock.now
        # slot -> salt of its KV cache; all slots whose KV a row reads must have the same salt
        self.space: Callable[[int], object] = lambda slot: ()
        self._behind: deque[StepPlan] = deque()  # a step that waits for its masks, and the steps after it
        self._early: dict[int, LateInputs] = {}  # masks by the id of a step in ``_behind``
        self._running: deque[SimStep] = deque()  # in order of submission; all but the last have drawn
        self._counter = StepCounter()  # counts of the steps that were begun
        self._free_at = 0.0  # time when the device has done all submitted work
        self._started = False
        self.states: SimStates | None = None  # recurrent states, or None if they are not checked
        self.mover: Mover | None = None  # mover of the tiers of the KV cache
        # (group, slot) -> positions i64 of the tokens that the KV cache holds of a compressed row
        self.held: dict[tuple[int, int], np.ndarray] = {}

    def start(self, wiring: Wiring) -> Capacity:
        vocab = self.options.vocab_size or _vocab_of(wiring.model_dir, wiring.hf_overrides)
        blocks = self._blocks(wiring)
        s, length = wiring.max_num_seqs, wiring.max_model_len
        eos = next((i for i in wiring.eos_ids if i < vocab), -1)
        self.model = MadeUpModel(vocab, eos, self.options.answer_tokens)
        self.text = self._histories(s, length)
        self.known, self.end, self.min_end, self.sample = (np.zeros(s, np.int64) for _ in range(4))
        self.stop_ids, self.n_eos = np.full((s, STOP_IDS), -1, np.int32), np.zeros(s, np.int32)
        self.stopped = np.ones(s, bool)
        # slot -> name of the processor that its request uses and that cannot be simulated
        self.refused: dict[int, str] = {}
        self.processors = [part.name for part in wiring.processors]
        self.block = wiring.block
        checkpoints, self.states = checkpoints_of(wiring), None
        if self.options.check:
            try:
                self.kv = [np.zeros((n, wiring.block), np.uint64) for n in blocks]
            except (MemoryError, ValueError) as e:
                raise ResourceError(f"sim: its check of {max(blocks)} KV blocks does not fit into memory") from e
            self.table = np.zeros((len(blocks), s, length // wiring.block + 2), np.int32)
            if checkpoints is not None:
                self.states = SimStates(s, checkpoints, wiring.speculation.num_speculative_tokens)
        # without the check a block has no content, and a page has 8 bytes
        kv = self.kv if self.options.check else [np.zeros((n, 1), np.uint64) for n in blocks]
        self.mover = sim_mover(wiring, kv, self.states, self.threaded)
        self._started = True
        depth = 1 if wiring.steps.run_ahead is None else wiring.steps.run_ahead
        notes = (MADE_UP,)
        return Capacity(
            blocks,
            (1,) * len(blocks),
            vocab,
            0,
            depth,
            notes,
            guides=True,
            checkpoints=checkpoints,
            compresses=self.observed,
            drafts_ahead=True,
            sums=self.sums,
        )

    def _blocks(self, wiring: Wiring) -> tuple[int, ...]:
        """Return the number of blocks of each KV group, with the null block.

        By default ``max_num_seqs`` rows of ``max_model_len`` tokens fit.
        """
        n = wiring.cache.num_kvcache_blocks + 1
        if wiring.cache.num_kvcache_blocks < 0:
            n = wiring.max_num_seqs * (wiring.max_model_len // wiring.block + 1) + 1
        if n >= MOST_BLOCKS:
            raise ResourceError(f"num_kvcache_blocks={n - 1}: expected fewer than {MOST_BLOCKS - 1}")
        return (n,) * max(len(wiring.cache.groups), 1)

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
        draft = plan.draft if len(plan.draft) else 0
        exact = (self.known[plan.slots] - 1 + draft).astype(np.int32)
        return replace(plan, computed=np.where(plan.slack > 0, exact, plan.computed), slack=no_rows())

    def supply(self, step: int, late: LateInputs) -> None:
        if any(plan.id == step for plan in self._behind):
            self._early[step] = late
            return
        self._sample(next(r for r in self._running if r.plan.id == step), late)
        self._enqueue()

    def _cost(self, plan: StepPlan) -> float:
        """Return the milliseconds of a step's FORWARD."""
        o = self.options
        if self.costs is not None:
            return 1e3 * self.costs.seconds(self._counter.count(plan, wake=self.wakes()))
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
            self._work(1e3 * self.costs.slopes["end"] * int(np.count_nonzero(result.flags & ENDED)))
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
            self.sample[slot], self.stopped[slot] = sample, False
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
        self.known[slots], self.end[slots], self.min_end[slots] = j.known, j.end, j.min_end
        self.sample[slots], self.n_eos[slots], self.stop_ids[slots] = j.sample, j.n_eos, j.stop_ids
        self.stopped[slots] = False
        at = np.concatenate([[0], np.cumsum(j.known)]).tolist()
        for i, slot in enumerate(slots.tolist()):
            self.text.put(slot, j.tokens[at[i] : at[i + 1]])
            self.held = {key: positions for key, positions in self.held.items() if key[1] != slot}
            self._refuse(slot, next((p for p, rows in zip(self.processors, j.bound, strict=False) if i in rows), None))

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
        """Return the result of a step that took ``ms`` on the device."""
        if self.options.check:
            self._check_plan(plan)
        drafts = self._draft(plan) if len(plan.draft) else None
        prompt = self._prompt_scores(plan) if len(plan.prompt) else None
        if self.options.check:
            for row in np.flatnonzero(~self.stopped[plan.slots]).tolist():
                self._read_and_write(*(int(x[row]) for x in (plan.slots, plan.q_len, plan.computed)))
            if self.states is not None:
                self.states.step(plan, ~self.stopped[plan.slots], self.text.prefix)
        n, slots, scored = len(plan.samples), plan.slots[plan.samples], plan.topk >= 0
        before = np.empty(0, np.uint64)  # hashes of the histories of drawn tokens, if their scores or logits are needed
        if scored or len(plan.host) or len(plan.late):
            before = self.text.prefix[slots, (plan.computed + plan.q_len)[plan.samples]]
        tokens, count = np.zeros(n, np.int32), np.zeros(n, np.int32)
        over = self.stopped[slots]
        errors: tuple[StepError, ...] = ()
        flags = over.astype(np.uint8) * np.uint8(OVERSHOOT)
        if drafts is not None:
            later = plan.draft[plan.samples] > 0
            over, flags[later] = over | later, 0
        rows = np.flatnonzero(~over)
        if self.refused:
            rows, errors = self._failed(slots, rows, flags)
        tokens[rows] = self._next(slots[rows])
        if late is not None:
            self._mask(plan, late, before, tokens)
        guided = self._guide(plan, late, tokens) if len(plan.guided) else None
        if len(plan.host) or len(plan.held):  # the host chooses the tokens of these rows
            rows = np.setdiff1d(rows, np.concatenate([plan.host, plan.held]))
        count[rows], flags[rows] = 1, self._commit(slots[rows], tokens[rows])
        if drafts is not None:
            self._accept(plan, drafts, tokens, count, flags)
        scores = self.model.scores(before, tokens, plan.topk) if scored else None
        if scores is not None and guided is not None:
            scores = scores_of(scores, plan.guided[:, 0], guided, tokens)
        return StepResult(
            plan.id,
            slots,
            tokens,
            count,
            flags,
            scores,
            prompt,
            self.model.logits(before[plan.host]),
            errors,
            ms,
            no_rows() if drafts is None else drafts[0],
        )

    def _next(self, slots: np.ndarray) -> np.ndarray:
        """Return the token that each of these rows draws, i64.

        Rows below ``min_tokens`` draw no token that would end them.
        """
        h = self.text.prefix[slots, self.known[slots]]
        tokens = self.model.draw(h, self.sample[slots])
        early = np.flatnonzero(self.known[slots] < self.min_end[slots])
        for i in early[(self.stop_ids[slots[early]] == tokens[early][:, None]).any(1)].tolist():
            ranked = self.model.at_rank(h[i : i + 1], np.arange(min(STOP_IDS + 1, self.model.vocab)))
            tokens[i] = next((t for t in ranked.tolist() if t not in self.stop_ids[slots[i]]), tokens[i])
        return tokens

    def _guide(self, plan: StepPlan, late: LateInputs | None, tokens: np.ndarray) -> np.ndarray:
        """Draw the tokens of rows with a guide, and return the logits f32 [n, V] from which they are drawn.

        The most likely token becomes the token of the row and of its guide.
        """
        rows, guides = plan.guided.T
        slots = plan.slots[plan.samples]
        at = self.text.prefix[slots, self.known[slots]]
        own, other = self.model.logits(at[rows]), self.model.logits(at[guides])
        found = plan.scale[:, None] * (own - other) + other
        for x, row, guide in zip(found, rows.tolist(), guides.tolist(), strict=True):
            slot, may = slots[row], np.ones(len(x), bool)
            if self.known[slot] < self.min_end[slot]:
                may[[t for t in self.stop_ids[slot].tolist() if 0 <= t < len(x)]] = False
            for mask in late.mask[plan.late == row] if late is not None else ():
                may &= np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little")[: len(x)] > 0
            tokens[[row, guide]] = np.where(may, x, -np.inf).argmax()
        return found

    def _mask(self, plan: StepPlan, late: LateInputs, before: np.ndarray, tokens: np.ndarray) -> None:
        for j, i in enumerate(plan.late.tolist()):
            words, token = late.mask[j], int(tokens[i])
            if not words[token >> 5] >> (token & 31) & 1:
                tokens[i] = self.model.likeliest(before[i], words)

    def _commit(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Append these tokens to rows and return their flags, u8."""
        n = self.known[slots]
        self._append(slots, tokens)
        flags = np.where(n + 1 >= self.end[slots], LENGTH, 0).astype(np.uint8)
        some = np.flatnonzero((self.stop_ids[slots, 0] >= 0) & (n >= self.min_end[slots]))
        if len(some):
            at = slots[some]
            stop = self.stop_ids[at] == tokens[some][:, None]
            eos = (stop & (np.arange(STOP_IDS) < self.n_eos[at][:, None])).any(1)
            flags[some] |= np.where(eos, EOS, np.where(stop.any(1), STOP_ID, 0)).astype(np.uint8)
        self.stopped[slots] = flags != 0
        return flags

    def _failed(
        self, slots: np.ndarray, rows: np.ndarray, flags: np.ndarray
    ) -> tuple[np.ndarray, tuple[StepError, ...]]:
        """Return the rows without unsupported processors, and an error for the other rows."""
        by: dict[str, list[int]] = {}
        for i in rows.tolist():
            if (name := self.refused.get(int(slots[i]))) is not None:
                by.setdefault(name, []).append(i)
        bad = [i for some in by.values() for i in some]
        flags[bad], self.stopped[slots[bad]] = FAILED, True
        message = "made-up tokens pass no processor; leave out what asks for it, or use another executor"
        errors = tuple(StepError("rows", f"executor sim: {name}", message, tuple(some)) for name, some in by.items())
        return rows[~np.isin(rows, bad)], errors

    def _prompt_scores(self, plan: StepPlan) -> LogProbs:
        rows = np.repeat(plan.prompt[:, 0], plan.prompt[:, 1])
        at = np.concatenate([np.arange(1, count + 1) for _, count in plan.prompt.tolist()]) + plan.computed[rows]
        slots = plan.slots[rows]
        return self.model.scores(self.text.prefix[slots, at], self.text.tokens[slots, at], plan.prompt_topk)

    def _draft(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Write drafts to the histories, of which the share ``drafts_accepted`` is right.

        Return the number of drafts of each speculating row, i32, and the token of each row of the plan that is a draft,
        i64 [R].
        """
        tokens = np.zeros(len(plan.slots), np.int64)
        for level in range(1, int(plan.draft.max()) + 1):
            rows = np.flatnonzero(plan.draft == level)
            slots, at = plan.slots[rows], plan.computed[rows]
            h = self.text.prefix[slots, at]
            wrong = uniform(mixed(h ^ DRAFT_LANE)) >= self.options.drafts_accepted
            tokens[rows] = (self.model.draw(h, self.sample[slots]) + wrong) % self.model.vocab
            self.text.append(slots, at, tokens[rows])
        last = (plan.draft > 0) & (np.append(plan.draft[1:], 0) == 0)
        return plan.draft[last], tokens

    def _accept(
        self,
        plan: StepPlan,
        drafts: tuple[np.ndarray, np.ndarray],
        tokens: np.ndarray,
        count: np.ndarray,
        flags: np.ndarray,
    ) -> None:
        """Draw the tokens of rows with drafts, in the order of the draft numbers.

        A row draws if its draft equals the token drawn before it, and if all earlier drafts were right.
        """
        level = plan.draft[plan.samples]
        for draft in range(1, int(level.max(initial=0)) + 1):
            rows = np.flatnonzero(level == draft)
            slots, at = plan.slots[plan.samples[rows]], plan.computed[plan.samples[rows]]
            holds = ~self.stopped[slots] & (self.known[slots] == at + 1)
            holds &= self.text.tokens[slots, at] == drafts[1][plan.samples[rows]]
            rows, slots = rows[holds], slots[holds]
            tokens[rows] = self._next(slots)
            count[rows], flags[rows] = 1, self._commit(slots, tokens[rows])

    # ---- check ---------------------------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        first = plan.draft == 0 if len(plan.draft) else np.ones(len(plan.slots), bool)
        slots = plan.slots[first]
        assert len(set(slots.tolist())) == len(slots), "a slot twice in a step, and not for a draft"
        assert (plan.q_len > 0).all() and (np.diff(plan.q_len > 1).clip(-1, 1) >= 0).all(), "one-token rows come first"
        rows = plan.samples[first[plan.samples]]
        known, due = self.known[plan.slots[rows]], (plan.computed + plan.q_len)[rows]
        off = ~self.stopped[plan.slots[rows]] & (known != due)
        assert not off.any(), f"rows {rows[off]} draw after {due[off]} tokens, and have {known[off]}"
        for r in np.flatnonzero(plan.draft == 1) - 1:
            slot, n = int(plan.slots[r]), int((plan.slots == plan.slots[r]).sum()) - 1
            assert r >= 0 and plan.draft[r : r + n + 1].tolist() == list(range(n + 1)), "drafts of a row stand apart"
            at = plan.computed[r : r + n + 1]
            assert (at == at[0] + np.arange(n + 1)).all(), f"drafts of slot {slot} for positions {at + 1}"

    def _tables(self, d: Delta) -> None:
        where = d.table[:, :3]
        assert len(np.unique(where, axis=0)) == len(where), "a table entry is named twice in one delta"
        self.table[tuple(where.T)] = d.table[:, 3]
        for g, slot, first, count in d.trim.tolist():
            self.table[g, slot, first : first + count] = 0
        for g, kv in enumerate(self.kv):
            copy = d.copy[d.copy[:, 0] == g]
            assert len(set(copy[:, 2].tolist())) == len(copy), "two copies to one block in one delta"
            # all sources are read before a target is written, because a target may be a source
            kv[copy[:, 2]] = kv[copy[:, 1]]

    def _own(self, slot: int, tokens: int) -> np.ndarray:
        """Return the content u64 [tokens] that the KV cache must have at each position of a row."""
        space = zlib.crc32(repr(self.space(slot)).encode())
        return self.text.prefix[slot, 1 : tokens + 1] ^ np.uint64(space)

    def _compact(self, d: Delta) -> None:
        """Move the kept tokens of compressed rows to their new blocks, and check those that were stored."""
        sources = d.sources.tolist()
        for g, slot, stored, kept, computed in d.compact.tolist():
            used = -(-stored // self.block)
            blocks, sources = np.array(sources[:used]), sources[used:]
            if self.stopped[slot]:
                continue  # the host has not seen yet that the sequence ended, and counts its tokens on
            positions = self.held.get((g, slot), np.arange(computed))
            assert len(positions) == stored, f"slot {slot} stores {len(positions)} tokens, the delta says {stored}"
            at = np.arange(stored)
            content = self.kv[g][blocks[at // self.block], at % self.block]
            own = self._own(slot, computed)[positions]
            assert (content == own).all(), f"group {g}: foreign KV of slot {slot} is compressed"
            chosen = np.sort(np.random.default_rng([slot, computed]).permutation(stored)[:kept])
            to = np.arange(kept)
            new = self.table[g, slot, to // self.block]
            assert (new > 0).all(), f"group {g} slot {slot}: a kept token has no block"
            self.kv[g][new, to % self.block] = content[chosen]
            self.held[g, slot] = positions[chosen]

    def _read_and_write(self, slot: int, q: int, computed: int) -> None:
        """Check and update the KV cache of all groups for a row's step."""
        own = self._own(slot, computed + q)
        for g, kv in enumerate(self.kv):
            positions = np.arange(computed + q)
            compressed = (g, slot) in self.held
            if compressed:
                positions = np.concatenate([self.held[g, slot], positions[computed:]])
                self.held[g, slot] = positions
            stored = len(positions) - q
            at = np.arange(len(positions))
            blocks, inside = self.table[g, slot, at // self.block], at % self.block
            reads = np.arange(stored)
            if compressed:
                pass  # the group has no window, and reads all stored tokens
            elif self.windows is not None:
                window = self.windows[g]
                reads = reads[0 if window is None else max(0, computed - window + 1) :]
            else:
                reads = reads[blocks[:stored] > 0]
            for p in reads[blocks[reads] <= 0][:1]:
                raise AssertionError(f"group {g} slot {slot}: position {p} has no block")
            for p in reads[kv[blocks[reads], inside[reads]] != own[positions[reads]]][:1]:
                raise AssertionError(f"group {g}: KV of another history at {p} of slot {slot}")
            for p in at[stored:][blocks[stored:] <= 0][:1]:
                raise AssertionError(f"group {g} slot {slot}: position {p}, which is written, has no block")
            kv[blocks[stored:], inside[stored:]] = own[positions[stored:]]


def _vocab_of(model_dir: str, overrides: Mapping[str, Any]) -> int:
    """Return the vocabulary's size in config.json.  ModelError if there is none."""
    path = Path(model_dir) / "config.json"
    if not files.is_there(path):
        raise ModelError(
            f"{model_dir}: has no config.json; expected a model directory, or vocab_size of the executor sim"
        )
    raw: Any = merge(files.read_json(path, files.PART, ModelError), overrides)
    found = raw.get("vocab_size", (raw.get("text_config") or {}).get("vocab_size"))
    if not isinstance(found, int) or found < 1:
        raise ModelError(f"{path}: has no vocab_size; set it as an option of the executor sim")
    return found
