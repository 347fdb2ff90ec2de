"""Token masks of *late* rows: rows whose mask is sent to the device after the plan of their step.

A mask has a bit for each token that the row may draw.  The host computes it while the device runs the step's layers.

A row has a mask by its grammar, by ``allowed_tokens_fn``, or by both, and then only tokens that both allow.  Matchers
receive tokens only here.  They receive all tokens since the last mask, so preemption and branches need no special case.
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
    """Return the bits of token ids in a mask with 32 tokens per word: the indices i64 of the words, and the bits i32 in
    each of these words."""
    words, where = np.unique(np.array(ids) // 32, return_inverse=True)
    bits = np.zeros(len(words), np.uint32)
    np.bitwise_or.at(bits, where, np.uint32(1) << np.array(ids, np.uint32) % 32)
    return words, bits.view(np.int32)


class _Ends:
    """Token ids, mostly end-of-sequence ids, that a mask forbids as long as it allows another token."""

    def __init__(self, at: Sequence[int], ids: Sequence[tuple[int, ...]]) -> None:
        """Store the token ids to forbid: ``ids[i]`` for row ``at[i]`` of the mask."""
        found: dict[tuple[int, ...], list[int]] = {}
        for i, some in enumerate(ids):
            if some:
                found.setdefault(some, []).append(i)
        # Rows grouped by equal ids to forbid; for each group: indices into ``at``, rows of the
        # mask, indices of the mask words, bits in these words.
        self.kinds = [
            (np.array(which), np.array(at)[which], *_bits(some)) for some, which in found.items()
        ]

    def leave_out(self, mask: np.ndarray, among: np.ndarray) -> None:
        """Exclude the stored ids from ``mask``, in place, for each row ``at[i]`` with ``among[i]`` (bool).  In a row
        that would allow no token otherwise the ids stay allowed."""
        for which, rows, words, ends in self.kinds:
            allowed = mask[rows[:, None], words]
            # Most masks forbid these ids already. Only the rows that allow one of them are changed, and
            # restored if they would allow no token.
            for i in np.flatnonzero((allowed & ends).any(axis=1) & among[which]).tolist():
                row = mask[rows[i]]
                row[words] = allowed[i] & ~ends
                if not row.any():
                    row[words] = allowed[i]


class _Late:
    """The rows of a step that have token masks.

    The next step usually has the same rows, so an object is used for several steps, which saves time per row."""

    def __init__(self, slots: np.ndarray, stays: np.ndarray, seqs: list[Seq | None]) -> None:
        # slot of each row, and serial number of its stay there, -1 if the row has left the slot
        self.slots = slots
        self.stays = stays
        stay = np.flatnonzero(stays >= 0).tolist()
        there: list[tuple[int, Seq]] = [(j, seqs[slots[j]]) for j in stay]  # type: ignore[misc]
        self.functions = [
            (j, seq) for j, seq in there if seq.request.params.allowed_tokens_fn is not None
        ]
        ruled = [(j, seq) for j, seq in there if seq.request.grammar is not None]
        # the rows with a grammar: index among all rows, and sequence
        self.at = [j for j, _ in ruled]
        self.seqs = [seq for _, seq in ruled]
        self.at_slots = slots[self.at]
        # grammar matcher of each of these rows; empty before their first mask
        self.matchers: list[Any] = []
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
                    raise ValueError("Grammar.start() returned None; expected a matcher")
        self.matchers = [seq.matcher for seq in self.seqs]
        self.matched[:] = [seq.matched for seq in self.seqs]

    def news(self, known: np.ndarray, tokens: np.ndarray) -> tuple[Sequence[int], list[list[int]]]:
        """Return which matchers have not received all tokens of their sequence (as indices), and the missing token ids
        of each.

        ``known`` i64 [n] has the number of known tokens of each row with a grammar, and ``tokens`` the ids of each
        slot.  The returned tokens count as received afterwards.
        """
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
    """The token masks of all rows.  ``grammars.plugin`` is the grammar plug-in, which makes matchers.  ``memory(rows,
    words)`` returns i32 host memory that the device reads without a copy (``Executor.mask_memory``)."""

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
        # memory with the masks of the last step, which the device has read
        self._held: np.ndarray | None = None
        # the rows of the last step with masks, or None if one of these sequences has ended
        self._late: _Late | None = None

    def of(self, flight: Flight) -> np.ndarray:
        """Return the masks i32 [n, ceil(V / 32)] of a step's n rows with masks (``StepPlan.late``).

        The results of all earlier steps must have been processed.  The next call overwrites the returned array.  Rows
        that have ended meanwhile are not restricted, because their tokens are dropped."""
        s = self.slots
        plan = flight.plan
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
        """Remove the matcher of a sequence that has ended, and all other data about it."""
        if seq.masked:
            self._late = None
            seq.matcher = None

    def _by_grammar(self, late: _Late, mask: np.ndarray) -> None:
        """Pass the newly drawn tokens to the grammar matchers, and let them fill their rows of ``mask``.  If the
        plug-in raises, all sequences with a grammar end.  If one matcher refuses its token, only this sequence ends."""
        plugin: Grammar = self.grammars.plugin
        known = self.slots.collected[late.at_slots].astype(np.int64)
        seqs = late.seqs
        matchers = late.matchers
        at = late.at
        sound = True
        try:
            if not matchers:
                self.seams.run("grammar", late.start, plugin)
                matchers = late.matchers
            gates = self.grammars.gates  # matchers do not receive the tokens of a model's reasoning
            behind, new = gates.passed(late.seqs, *late.news(known, self.slots.tokens))
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
            gates.widen(seqs, mask, at)
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
        """Restrict a mask row in place to the tokens that the user's function allows.  An error of the function ends
        the sequence."""
        try:
            known = self.slots.collected[seq.slot]
            so_far = seq.request.ids(self.slots.tokens[seq.slot, :known])
            function: Any = seq.request.params.allowed_tokens_fn
            # converting the function's result may call code of the user too
            ids = call_foreign(lambda: checks.allowed_tokens(function(so_far), self.vocab))
        except Exception as e:  # only the request with this function ends
            self.finish(seq, "error", error=f"allowed_tokens_fn: {describe_error(e)}")
            row[:] = -1
            return
        bits = np.zeros(len(row) * 32, bool)
        bits[ids] = True
        allowed: Any = np.packbits(bits, bitorder="little").view("<i4")
        row[:] = allowed if seq.request.grammar is None else row & allowed
