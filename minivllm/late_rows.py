"""Masks of late rows: which tokens they may draw, computed on the host while the layers of their step run.

A row has a mask by its grammar, by ``allowed_tokens_fn``, or by both, which then must agree.  Matchers are told of
tokens here and nowhere else: whatever became known since the last time, so that preemption and branches need no care.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.plan import LateInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minivllm.core.engine import Engine
    from minivllm.core.interfaces.grammar import Grammar
    from minivllm.core.interfaces.plan import StepPlan
    from minivllm.core.publisher import Flight
    from minivllm.core.request import Seq
    from minivllm.core.slots import Slots
    from minivllm.core.timing import SeamTimes

PLAN, SUBMIT, WAIT, PUBLISH = range(4)  # columns of StepClock.part


class Masks:
    """``grammars.plugin`` made the matchers' grammars; ``finish(seq, reason, error=...)`` is the engine's.
    ``memory(rows, words)`` is i32 host memory that the device reads without a copy (``Executor.mask_memory``)."""

    def __init__(
        self, slots: Slots, vocab: int, grammars: Any, finish: Callable[..., None], seams: SeamTimes,
        memory: Callable[[int, int], np.ndarray],
    ) -> None:  # fmt: skip
        self.slots, self.vocab, self.grammars, self.finish, self.seams = slots, vocab, grammars, finish, seams
        self.memory = memory
        self._held: np.ndarray | None = None  # the last step's, which has been drawn meanwhile

    def of(self, flight: Flight) -> np.ndarray:
        """i32 [n, ceil(V / 32)] for the n late rows of a step, all steps before which have been published.  The array
        is used again for the next such step.  Rows that ended meanwhile are not restricted: they draw nothing."""
        s, plan = self.slots, flight.plan
        rows = plan.samples[plan.late]
        slots = plan.slots[rows]
        if self._held is None or len(rows) > len(self._held):
            self._held = self.memory(max(len(rows), s.size), -(-self.vocab // 32))
        mask = self._held[: len(rows)]
        live = s.serial[slots] == flight.serial[rows]
        mask[~live] = -1
        at = np.flatnonzero(live).tolist()
        seqs: list[Seq] = [s.seq[i] for i in slots[live].tolist()]  # type: ignore[misc]
        ruled = [(j, seq) for j, seq in zip(at, seqs, strict=True) if seq.request.grammar is not None]
        if ruled:
            self._by_grammar(ruled, mask)
            self._hold_ends(ruled, mask)
        for j, seq in zip(at, seqs, strict=True):
            if seq.request.params.allowed_tokens_fn is not None and seq.slot >= 0:
                self._by_function(seq, mask[j])
        return mask

    def _by_grammar(self, ruled: Sequence[tuple[int, Seq]], mask: np.ndarray) -> None:
        """Tell the matchers what was drawn since the last time, and fill their rows.  A plug-in that raises ends the
        sequences that it serves; one that a matcher cannot follow ends that one."""
        s = self.slots
        plugin: Grammar = self.grammars.plugin
        slots = np.array([seq.slot for _, seq in ruled])
        known = s.collected[slots]
        last = s.tokens[slots, known - 1].tolist()
        matchers, tokens, behind = [], [], []
        try:
            for (_, seq), n, token in zip(ruled, known.tolist(), last, strict=True):
                if seq.matcher is None:
                    seq.matcher, seq.matched = plugin.start(seq.request.grammar), len(seq.request.prompt)
                if n > seq.matched:
                    matchers.append(seq.matcher)
                    tokens.append([token] if n == seq.matched + 1 else s.tokens[seq.slot, seq.matched : n].tolist())
                    behind.append(seq)
                    seq.matched = n
            took = self.seams.run("grammar", plugin.accept, matchers, tokens) if matchers else ()
            for seq, new, count in zip(behind, tokens, took, strict=True):
                if count < len(new):
                    self._fail(seq, f"its matcher refused the token {new[count]}, which was drawn under its mask")
            go = [(j, seq) for j, seq in ruled if seq.slot >= 0]
            failed = self.seams.run("grammar", plugin.fill, [seq.matcher for _, seq in go], mask, [j for j, _ in go])
            for i, message in failed.items():
                self._fail(go[i][1], message)
        except Exception as e:
            for _, seq in ruled:
                self._fail(seq, f"{type(plugin).__name__} failed: {type(e).__name__}: {e}")
        for j, seq in ruled:
            if seq.slot < 0:
                mask[j] = -1

    def _fail(self, seq: Seq, message: str) -> None:
        if seq.slot >= 0:
            self.finish(seq, "error", error=f"structured_outputs: {message}")

    def _hold_ends(self, ruled: Sequence[tuple[int, Seq]], mask: np.ndarray) -> None:
        """``ignore_eos`` and ``min_tokens`` put the end off for as long as the grammar has anything else to go on
        with."""
        held: dict[tuple[int, ...], list[int]] = {}  # ids -> the rows that are to do without them
        for j, seq in ruled:
            r, p = seq.request, seq.request.params
            if seq.slot < 0 or not (p.min_tokens or p.ignore_eos):
                continue
            early = p.min_tokens and int(self.slots.collected[seq.slot]) < len(r.prompt) + p.min_tokens
            if ids := r.stop_ids if early else r.eos_ids if p.ignore_eos else ():
                held.setdefault(ids, []).append(j)
        for ids, found in held.items():
            rows, bits = np.array(found), np.zeros(mask.shape[1], np.uint32)
            np.bitwise_or.at(bits, np.array(ids) // 32, np.uint32(1) << np.array(ids, np.uint32) % 32)
            words = np.flatnonzero(bits)
            ends = bits[words].view(np.int32)
            allowed = mask[rows[:, None], words]
            # Where a text may end is rare, so the rest of a row is looked at only there.
            for i in np.flatnonzero((allowed & ends).any(axis=1)).tolist():
                row = mask[rows[i]]
                row[words] = allowed[i] & ~ends
                if not row.any():
                    row[words] = allowed[i]

    def _by_function(self, seq: Seq, row: np.ndarray) -> None:
        """What the user's function allows: in place, within what the grammar left."""
        try:
            so_far = self.slots.tokens[seq.slot, : self.slots.collected[seq.slot]].tolist()
            ids = np.asarray(seq.request.params.allowed_tokens_fn(so_far), np.int64)  # type: ignore[misc]
            if not ids.size or ids.min() < 0 or ids.max() >= self.vocab:
                what = "tokens outside the vocabulary" if ids.size else "no token"
                raise ValueError(f"it allowed {what}; want ids 0 to {self.vocab - 1}")
        except Exception as e:  # the user's code: it ends its own request and nothing else
            self.finish(seq, "error", error=f"allowed_tokens_fn: {type(e).__name__}: {e}")
            row[:] = -1
            return
        bits = np.zeros(len(row) * 32, bool)
        bits[ids] = True
        allowed: Any = np.packbits(bits, bitorder="little").view("<i4")
        row[:] = allowed if seq.request.grammar is None else row & allowed


def supply(engine: Engine, plan: StepPlan) -> None:
    """The masks of a step whose layers run: they follow from the tokens of every step before it.

    The step after it is planned before they are handed over: what draws takes less time than a plan, and the layers of
    that step are to be on the device by then.  Not where hooks are round "plan and submit", nor where a step's tokens
    are known before the next is planned."""
    clock = engine.clock
    engine.collect(1)
    clock.lap(PUBLISH)
    mask = engine.masks.of(engine.in_flight[-1])
    clock.lap(SUBMIT)
    if engine.capacity.depth and engine.hooks is None and not engine.dead:
        engine.ahead = engine.plan()
        clock.lap(PLAN)
    engine.executor.supply(plan.id, LateInputs(mask))
    clock.lap(SUBMIT)
