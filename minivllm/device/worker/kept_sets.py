"""The tokens that compressions have kept.  A preempted row keeps the same tokens when it is computed again.

    slot 3      (group 0, 20 tokens) ──► i32 [layers, kv_heads, kept]      ascending, numbers of stored tokens
       │ preempted                                ▲ joins again
       ▼                                          │
    sequence 41 ──────────────────────────────────┘

Scores of the second computation can differ in their last bits, and its tokens then differ from those that were sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .state import to_host

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import Delta


class KeptSets:
    """The kept tokens of the compressions of running and of preempted rows, on the device."""

    def __init__(self) -> None:
        self._of_slot: dict[int, dict[tuple[int, int], Tensor]] = {}
        self._of_sequence: dict[int, dict[tuple[int, int], Tensor]] = {}
        self._returned: list[Tensor] = []

    def note(self, delta: Delta) -> None:
        """Save the sets of preempted rows, and assign sets to rows that join again and to rows that fork.

        A row that joins gets the set of its sequence, and a fork the set of its parent.  A row may join the slot that
        another row leaves.
        """
        of_slot = self._of_slot
        for slot, seq in delta.keep.tolist():
            self._of_sequence[seq] = of_slot.get(slot, {})
        for slot in delta.leave.tolist():
            self._of_slot.pop(slot, None)
        join = delta.join
        if join is not None:
            saved = join.saved.tolist() or [-1] * len(join.slot)
            for slot, seq in zip(join.slot.tolist(), saved, strict=True):
                of_sequence = self._of_sequence.get(seq, {})
                of_slot[slot] = dict(of_sequence)
        for source, slot, _ in delta.fork.tolist():
            of_parent = of_slot.get(source, {})
            of_slot[slot] = dict(of_parent)
        for seq in delta.forget.tolist():
            self._of_sequence.pop(seq, None)

    def find(self, slot: int, group: int, computed: int) -> Tensor | None:
        """Return the recorded tokens i32 [layers, kv_heads, kept] of a group, None if there are none."""
        return self._of_slot.get(slot, {}).get((group, computed))

    def add(self, slot: int, group: int, computed: int, chosen: Tensor) -> None:
        """Record the tokens that stay in the layers of a group when the row has ``computed`` tokens."""
        self._of_slot.setdefault(slot, {})[group, computed] = chosen

    def send(self, chosen: Tensor) -> None:
        """Return these tokens with the result of the step."""
        self._returned.append(chosen)

    def take(self) -> Tensor | None:
        """Start the copy of the tokens of ``send`` to the host, and return them i32 in one dimension; None if there are
        none."""
        sent = self._returned
        self._returned = []
        if not sent:
            return None
        tokens = torch.cat([chosen.flatten() for chosen in sent])
        return to_host(tokens)
