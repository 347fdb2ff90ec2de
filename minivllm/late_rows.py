"""Masks of late rows: which tokens they may draw, computed on the host while the layers of their step run.

A row has a mask by its grammar, by ``allowed_tokens_fn``, or by both, which then must agree.  Matchers are told of
tokens here and nowhere else: whatever became known since the last time, so that preemption and branches need no care.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minivllm.core.interfaces.grammar import Grammar
    from minivllm.core.publisher import Flight
    from minivllm.core.request import Seq
    from minivllm.core.slots import Slots
    from minivllm.core.timing import SeamTimes


class Masks:
    """``grammars.plugin`` made the matchers' grammars; ``finish(seq, reason, error=...)`` is the engine's."""

    def __init__(self, slots: Slots, vocab: int, grammars: Any, finish: Callable[..., None], seams: SeamTimes) -> None:
        self.slots, self.vocab, self.grammars, self.finish, self.seams = slots, vocab, grammars, finish, seams
        self._held = np.empty((0, -(-vocab // 32)), np.int32)  # the last step's, which has been drawn meanwhile

    def of(self, flight: Flight) -> np.ndarray:
        """i32 [n, ceil(V / 32)] for the n late rows of a step, all steps before which have been published.  The array
        is used again for the next such step.  Rows that ended meanwhile are not restricted: they draw nothing."""
        s, plan = self.slots, flight.plan
        rows = plan.samples[plan.late]
        slots = plan.slots[rows]
        if len(rows) > len(self._held):
            self._held = np.empty((2 * len(rows), self._held.shape[1]), np.int32)
        mask = self._held[: len(rows)]
        live = s.serial[slots] == flight.serial[rows]
        mask[~live] = -1
        at = np.flatnonzero(live)
        seqs: list[Seq] = [s.seq[i] for i in slots[at].tolist()]  # type: ignore[misc]
        ruled = [(j, seq) for j, seq in zip(at.tolist(), seqs, strict=True) if seq.request.grammar is not None]
        if ruled:
            self._by_grammar(ruled, mask)
        for j, seq in zip(at.tolist(), seqs, strict=True):
            p = seq.request.params
            if seq.slot >= 0 and seq.request.grammar is not None and (p.min_tokens or p.ignore_eos):
                self._hold_end(seq, mask[j])
            if seq.slot >= 0 and p.allowed_tokens_fn is not None:
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
            for i, ((_, seq), n) in enumerate(zip(ruled, known.tolist(), strict=True)):
                if seq.matcher is None:
                    seq.matcher, seq.matched = plugin.start(seq.request.grammar), len(seq.request.prompt)
                if n > seq.matched:
                    new = [last[i]] if n == seq.matched + 1 else s.tokens[seq.slot, seq.matched : n].tolist()
                    matchers.append(seq.matcher)
                    tokens.append(new)
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

    def _hold_end(self, seq: Seq, row: np.ndarray) -> None:
        """``ignore_eos`` and ``min_tokens`` put the end off for as long as the grammar has anything else to go on
        with."""
        r, p = seq.request, seq.request.params
        early = int(self.slots.collected[seq.slot]) < len(r.prompt) + p.min_tokens
        ids = np.array(r.stop_ids if early else r.eos_ids if p.ignore_eos else (), np.int64)
        rest = row.copy()
        np.bitwise_and.at(rest, ids // 32, ~(np.int64(1) << ids % 32).astype(np.uint32).view(np.int32))
        if rest.any():
            row[:] = rest

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
