"""The tokens that compressions of the KV cache kept, so that a preempted sequence keeps the same tokens when it is
computed again.

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
    """The tokens that compressions kept, on the device, for running and for preempted sequences."""

    def __init__(self) -> None:
        self._of_slot: dict[int, dict[tuple[int, int], Tensor]] = {}
        self._of_sequence: dict[int, dict[tuple[int, int], Tensor]] = {}
        self._returned: list[Tensor] = []

    def note(self, delta: Delta) -> None:
        """Save the kept tokens of preempted sequences, and restore them for sequences that join again.

        A fork gets the kept tokens of its parent.  A sequence may join the slot that another one leaves.
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
        """Return the tokens i32 [layers, kv_heads, kept] that a compression at ``computed`` tokens kept, None without a
        record."""
        return self._of_slot.get(slot, {}).get((group, computed))

    def add(self, slot: int, group: int, computed: int, chosen: Tensor) -> None:
        """Record the tokens that the compression of a KV group at ``computed`` tokens kept."""
        self._of_slot.setdefault(slot, {})[group, computed] = chosen

    def send(self, chosen: Tensor) -> None:
        """Add kept tokens to those that the result of the step returns."""
        self._returned.append(chosen)

    def take(self) -> Tensor | None:
        """Start the copy of the tokens that ``send`` collected to the host, and return the copy, i32 [n]; None without
        any."""
        sent = self._returned
        self._returned = []
        if not sent:
            return None
        tokens = torch.cat([chosen.flatten() for chosen in sent])
        return to_host(tokens)
