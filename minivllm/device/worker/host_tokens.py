"""The tokens of all sequences on the host of a worker, for drafters that read them there.

The device appends accepted tokens to its own columns, and the host of the worker reads them only in results.  A row
that speculates has no step in flight, so all tokens of the row have come back when its drafts are proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import Join, StepPlan, StepResult


class HostTokens:
    """The known tokens of the sequence in each slot, up to ``max_len`` tokens.

    ``ended(owner, tokens, prompt)`` is called for each sequence that leaves its slot, with the arguments of
    ``Drafter.learn``.
    """

    def __init__(self, slots: int, max_len: int, ended: Callable[[int, np.ndarray, int], None]) -> None:
        self.ended = ended
        # costs memory only for tokens that exist, because the operating system allocates a page at its first write
        self.tokens = np.empty((slots, max_len + 1), np.int32)
        self.length = np.zeros(slots, np.int64)
        self.prompt = np.zeros(slots, np.int64)
        self.owner = np.zeros(slots, np.int64)
        self.since = np.zeros(slots, np.int64)  # slot -> id of the step in which its sequence joined

    def apply(self, plan: StepPlan) -> None:
        """Apply the changes ``plan.delta`` of the sequences in slots, in the order that ``Delta`` defines."""
        delta = plan.delta
        before = self.length
        if len(delta.fork):
            before = before.copy()
        for slot in delta.leave.tolist():
            self._leave(slot)
        if delta.join is not None:
            self._join(delta.join, plan.id)
        for source, to, _ in delta.fork.tolist():
            self.tokens[to] = self.tokens[source]
            # the length of a parent that leaves its slot in this step is 0 already, but its tokens are still stored
            self.length[to] = self.length[source] or before[source]
            for column in (self.prompt, self.owner):
                column[to] = column[source]
            self.since[to] = plan.id
        for slot, token in delta.token.tolist():
            self.tokens[slot, self.length[slot]] = token
            self.length[slot] += 1

    def _leave(self, slot: int) -> None:
        """Call ``ended`` with the tokens of a slot whose sequence leaves it, and empty the slot."""
        n = int(self.length[slot])
        self.length[slot] = 0
        if n:
            tokens = self.tokens[slot, :n].copy()
            owner = int(self.owner[slot])
            prompt = int(self.prompt[slot])
            self.ended(owner, tokens, prompt)

    def _join(self, join: Join, step: int) -> None:
        begin = 0
        lengths = join.known.tolist()
        for slot, n in zip(join.slot.tolist(), lengths, strict=True):
            end = begin + n
            self.tokens[slot, :n] = join.tokens[begin:end]
            begin = end
        self.length[join.slot] = join.known
        self.prompt[join.slot] = join.prompt
        self.owner[join.slot] = join.owner if len(join.owner) else 0
        self.since[join.slot] = step

    def collect(self, plan: StepPlan, result: StepResult) -> None:
        """Append the accepted tokens of a step to the sequences of their slots.

        A token is dropped if another sequence has joined its slot after the step."""
        rows = plan.samples
        slots = plan.slots[rows]
        current = (self.since[slots] <= plan.id) & (self.length[slots] > 0)
        accepted = current & (result.count > 0)
        ends = (plan.computed + plan.q_len)[rows]
        at = ends[accepted]
        slots = slots[accepted]
        self.tokens[slots, at] = result.tokens[accepted]
        np.maximum.at(self.length, slots, at + 1)

    def known(self, slots: np.ndarray, known: np.ndarray) -> list[np.ndarray]:
        """Return the first ``known`` i32 [N] tokens of the sequences in ``slots`` i32 [N], as views.

        Raise RuntimeError if a token has not been returned to the host yet, which is a fault of the engine.
        """
        lengths = self.length[slots]
        if (lengths < known).any():
            raise RuntimeError(f"slots {slots.tolist()} have {lengths.tolist()} tokens; expected {known}")
        counts = zip(slots.tolist(), known.tolist(), strict=True)
        return [self.tokens[slot, :n] for slot, n in counts]
