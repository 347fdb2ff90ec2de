"""The recurrent states of the simulated device, which store the number of covered tokens and a hash of these tokens.

The indices, copies and checkpoints are those of ``device.worker.recurrent``.  A step raises AssertionError if its state
belongs to another row, or covers other tokens than the row needs.
"""

from __future__ import annotations

import numpy as np

from minivllm.core.interfaces.executor import Wiring
from minivllm.core.interfaces.plan import Delta, StepPlan

CHECKPOINTS_EACH = 4  # number of checkpoints per slot if memory is not the limit, as in ``device.worker.build``


def checkpoints_of(wiring: Wiring) -> int | None:
    """Return the number of checkpoints of recurrent states, None for a model without such states."""
    if not wiring.cache.recurrent:
        return None
    requested = wiring.cache.num_state_checkpoints
    return CHECKPOINTS_EACH * wiring.max_num_seqs if requested < 0 else requested


class SimStates:
    """The number of covered tokens and the hash of these tokens for each recurrent state: one for each slot, the null
    state, and the checkpoints.
    """

    def __init__(self, slots: int, checkpoints: int, drafts: int) -> None:
        total = slots + 1 + checkpoints
        self.drafts = drafts
        self.covered = np.zeros(total, np.int64)
        self.hashes = np.zeros(total, np.uint64)
        # (slot, 0 or 1 for the first or second planned copy of its state) -> (position at which to copy, index of the
        # target state)
        self.saves: dict[tuple[int, int], tuple[int, int]] = {}

    def apply(self, delta: Delta) -> None:
        """Copy states, empty the states of slots with new sequences, and note the copies to make."""
        source, to = delta.state.T
        assert len(set(to.tolist())) == len(to), "two recurrent states are copied to one place in one delta"
        self.covered[to] = self.covered[source]
        self.hashes[to] = self.hashes[source]
        joined = np.empty(0, np.int32) if delta.join is None else delta.join.slot
        self.covered[np.setdiff1d(joined, to)] = 0
        changed = {*joined.tolist(), *to.tolist()}
        for key in list(self.saves):
            if key[0] in changed:
                del self.saves[key]
        for slot, which, position, index in delta.save.tolist():
            self.saves[slot, which] = position, index

    def step(self, plan: StepPlan, live: np.ndarray, prefix: np.ndarray) -> None:
        """Run a step of the rows ``live`` bool [R]; ``prefix[slot, n]`` is the hash of a slot's first n tokens."""
        level = np.zeros(len(plan.slots) + 1, np.int64)  # one element more than rows, so that each row has a next one
        if len(plan.draft):
            level[:-1] = plan.draft
        first = level[:-1] == 0
        for row in np.flatnonzero(live & first).tolist():
            slot = int(plan.slots[row])
            start = int(plan.computed[row])
            n = int(plan.q_len[row])
            drafted = bool(level[row + 1] == 1)
            self._step(slot, start, n, drafted, prefix[slot])

    def _step(self, slot: int, start: int, n: int, drafted: bool, prefix: np.ndarray) -> None:
        begin = int(self.covered[slot]) if start else 0
        most = self.drafts + 1 if self.drafts else 0
        behind = start - begin
        assert 0 <= behind <= most, f"the state of slot {slot} covers {begin} tokens, and {start} are computed"
        assert not start or self.hashes[slot] == prefix[begin], f"the state of slot {slot} is of other tokens"
        for which in range(2):
            position, index = self.saves.get((slot, which), (-1, -1))
            if begin < position <= start + n:
                self.covered[index] = position
                self.hashes[index] = prefix[position]
        end = start if drafted else start + n
        self.covered[slot] = end
        self.hashes[slot] = prefix[end]
