"""Masks of late rows: which tokens they may draw, computed on the host while the layers of their step run.

A row has a mask by its grammar, by ``allowed_tokens_fn``, or by both, which then must agree.  Matchers are told of
tokens here and nowhere else: whatever became known since the last time, so that preemption and branches need no care.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core import checks
from minivllm.core.external_calls import call_foreign
from minivllm.errors import describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minivllm.core.interfaces.grammar import Grammar
    from minivllm.core.timing import SeamTimes

    from .flight import Flight
    from .request import FinishSequence, Seq
    from .slots import Slots


@functools.lru_cache(256)
def _bits(ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The words i64 of a mask that hold the bits of these ids, and the bits i32."""
    words, where = np.unique(np.array(ids) // 32, return_inverse=True)
    bits = np.zeros(len(words), np.uint32)
    np.bitwise_or.at(bits, where, np.uint32(1) << np.array(ids, np.uint32) % 32)
    return words, bits.view(np.int32)


class _Ends:
    """Ids that rows of a mask are to do without for as long as they have anything else to go on with."""

    def __init__(self, at: Sequence[int], ids: Sequence[tuple[int, ...]]) -> None:
        """``ids[i]`` are those of row ``at[i]``."""
        found: dict[tuple[int, ...], list[int]] = {}
        for i, some in enumerate(ids):
            if some:
                found.setdefault(some, []).append(i)
        # rows of equal ids together: their indices i, rows, and the ids as words and bits of these
        self.kinds = [
            (np.array(which), np.array(at)[which], *_bits(some)) for some, which in found.items()
        ]

    def leave_out(self, mask: np.ndarray, among: np.ndarray) -> None:
        """In place; of row ``at[i]`` if ``among[i]``, bool."""
        for which, rows, words, ends in self.kinds:
            allowed = mask[rows[:, None], words]
            # Where a text may end is rare, so the rest of a row is looked at only there.
            for i in np.flatnonzero((allowed & ends).any(axis=1) & among[which]).tolist():
                row = mask[rows[i]]
                row[words] = allowed[i] & ~ends
                if not row.any():
                    row[words] = allowed[i]


class _Late:
    """The late rows of a step.  Most of the time the next step has the same ones: what does not change is kept, so that
    next to nothing is done for each of them."""

    def __init__(self, slots: np.ndarray, stays: np.ndarray, seqs: list[Seq | None]) -> None:
        self.slots, self.stays = slots, stays  # stays: their serials, -1 of those that have left
        stay = np.flatnonzero(stays >= 0).tolist()
        there: list[tuple[int, Seq]] = [(j, seqs[slots[j]]) for j in stay]  # type: ignore[misc]
        self.functions = [
            (j, seq) for j, seq in there if seq.request.params.allowed_tokens_fn is not None
        ]
        ruled = [(j, seq) for j, seq in there if seq.request.grammar is not None]
        # those that have a grammar
        self.at, self.seqs = [j for j, _ in ruled], [seq for _, seq in ruled]
        self.at_slots = slots[self.at]
        self.matchers: list[Any] = []  # theirs, from the first mask on
        self.matched = np.zeros(len(ruled), np.int64)  # ``Seq.matched`` of each
        requests = [seq.request for seq in self.seqs]
        self.min_length = np.array([r.stops.min_length for r in requests], np.int64)
        self.before = _Ends(self.at, [r.stops.avoided_before for r in requests])
        self.after = _Ends(self.at, [r.stops.avoided_after for r in requests])

    def same(self, slots: np.ndarray, stays: np.ndarray) -> bool:
        return np.array_equal(self.stays, stays) and np.array_equal(self.slots, slots)

    def start(self, plugin: Grammar) -> None:
        for seq in self.seqs:
            if seq.matcher is None:
                seq.matcher = plugin.start(seq.request.grammar)
                seq.matched = len(seq.request.prompt)
                if seq.matcher is None:
                    raise ValueError("start() gave None; want a matcher")
        self.matchers = [seq.matcher for seq in self.seqs]
        self.matched[:] = [seq.matched for seq in self.seqs]

    def news(self, known: np.ndarray, tokens: np.ndarray) -> tuple[Sequence[int], list[list[int]]]:
        """The indices of those whose matchers have not heard of all ``known`` tokens, i64 [n], and what they are to
        hear, which counts as heard."""
        behind: Sequence[int] = range(len(known))
        if (known == self.matched + 1).all():
            new = tokens[self.at_slots, self.matched][:, None].tolist()
        else:
            behind = np.flatnonzero(known > self.matched).tolist()
            new = [tokens[self.at_slots[i], self.matched[i] : known[i]].tolist() for i in behind]
        self.matched = known
        for seq, n in zip(self.seqs, known.tolist(), strict=True):
            seq.matched = n
        return behind, new


class RowMasks:
    """``grammars.plugin`` made the matchers' grammars; ``memory(rows, words)`` is i32 host memory that the device reads
    without a copy (``Executor.mask_memory``)."""

    def __init__(
        self,
        slots: Slots,
        vocab: int,
        grammars: Any,
        finish: FinishSequence,
        seams: SeamTimes,
        memory: Callable[[int, int], np.ndarray],
    ) -> None:
        self.slots = slots
        self.vocab = vocab
        self.grammars = grammars
        self.finish = finish
        self.seams = seams
        self.memory = memory
        self._held: np.ndarray | None = None  # the last step's, which has been drawn meanwhile
        self._late: _Late | None = None  # the last step's, unless one of them has ended since

    def of(self, flight: Flight) -> np.ndarray:
        """i32 [n, ceil(V / 32)] for the n late rows of a step, all steps before which have been published.  The array
        is used again for the next such step.  Rows that ended meanwhile are not restricted: they draw nothing."""
        s, plan = self.slots, flight.plan
        rows = plan.samples[plan.late]
        slots = plan.slots[rows]
        if self._held is None or len(rows) > len(self._held):
            self._held = self.memory(max(len(rows), s.size), -(-self.vocab // 32))
        mask = self._held[: len(rows)]
        stays = np.where(s.serial[slots] == flight.serial[rows], flight.serial[rows], -1)
        if self._late is None or not self._late.same(slots, stays):
            self._late = _Late(slots, stays, s.seq)
        late = self._late
        mask[stays < 0] = -1
        if late.seqs:
            self._by_grammar(late, mask)
        for j, seq in late.functions:
            if seq.slot >= 0:
                self._by_function(seq, mask[j])
        return mask

    def forget(self, seq: Seq) -> None:
        """It has ended: nothing of it is kept."""
        if seq.masked:
            self._late, seq.matcher = None, None

    def _by_grammar(self, late: _Late, mask: np.ndarray) -> None:
        """Tell the matchers what was drawn since the last time, and fill their rows.  A plug-in that raises ends the
        sequences that it serves; one that a matcher cannot follow ends that one."""
        plugin: Grammar = self.grammars.plugin
        known = self.slots.collected[late.at_slots].astype(np.int64)
        seqs, matchers, at, sound = late.seqs, late.matchers, late.at, True
        try:
            if not matchers:
                self.seams.run("grammar", late.start, plugin)
                matchers = late.matchers
            behind, new = late.news(known, self.slots.tokens)
            those = matchers if len(behind) == len(seqs) else [matchers[i] for i in behind]
            took = (
                checks.accepted(self.seams.run("grammar", plugin.accept, those, new), new)
                if those
                else ()
            )
            if refused := [
                (i, ids[n]) for i, ids, n in zip(behind, new, took, strict=True) if n < len(ids)
            ]:
                for i, token in refused:
                    self._fail(
                        seqs[i],
                        f"its matcher refused the token {token}, which was drawn under its mask",
                    )
                go = [i for i, seq in enumerate(seqs) if seq.slot >= 0]
                seqs = [seqs[i] for i in go]
                matchers = [matchers[i] for i in go]
                at = [at[i] for i in go]
            failed = checks.stuck(
                self.seams.run("grammar", plugin.fill, matchers, mask, at), len(matchers)
            )
            for i, message in failed.items():
                self._fail(seqs[i], message)
            sound = not refused and not failed
        except Exception as e:
            sound = False
            for seq in late.seqs:
                self._fail(seq, f"{type(plugin).__name__} failed: {describe_error(e, plugin)}")
        early = known < late.min_length
        late.before.leave_out(mask, early)
        late.after.leave_out(mask, ~early)
        for j, seq in zip(late.at, late.seqs, strict=True) if not sound else ():
            if seq.slot < 0:
                mask[j] = -1

    def _fail(self, seq: Seq, message: str) -> None:
        if seq.slot >= 0:
            self.finish(seq, "error", error=f"structured_outputs: {message}")

    def _by_function(self, seq: Seq, row: np.ndarray) -> None:
        """What the user's function allows: in place, within what the grammar left."""
        try:
            so_far = self.slots.tokens[seq.slot, : self.slots.collected[seq.slot]].tolist()
            function: Any = seq.request.params.allowed_tokens_fn
            ids = call_foreign(
                lambda: checks.allowed_tokens(function(so_far), self.vocab)
            )  # its answer may run code too
        except Exception as e:  # the user's code: it ends its own request and nothing else
            self.finish(seq, "error", error=f"allowed_tokens_fn: {describe_error(e)}")
            row[:] = -1
            return
        bits = np.zeros(len(row) * 32, bool)
        bits[ids] = True
        allowed: Any = np.packbits(bits, bitorder="little").view("<i4")
        row[:] = allowed if seq.request.grammar is None else row & allowed
