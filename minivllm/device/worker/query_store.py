"""The queries (with rotary embedding) of the last tokens of sequences whose KV cache is compressed next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minivllm.core.interfaces.attention import AttnLayer
    from minivllm.core.interfaces.plan import Delta, StepPlan


class StepQueries:
    """The queries of all tokens of a captured decode step, by layer.  Each replay overwrites them."""

    def __init__(self) -> None:
        self.of_layer: dict[int, Tensor] = {}

    def keep(self, layer: int, q: Tensor) -> None:
        """Store the queries q [T, heads, dim] of a layer.

        A view of a larger tensor is copied, because later layers may overwrite that tensor."""
        whole = q.untyped_storage().nbytes() == q.nbytes
        self.of_layer[layer] = q if whole else q.clone()


class QueryStore:
    """The queries of the last tokens of sequences whose KV cache is compressed next, by slot and layer."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}
        # (slot, first token, end, whether queries of earlier tokens are stored) of the requests of the running step
        self._wanted: list[tuple[int, int, int, int]] = []

    def of_step(self, plan: StepPlan) -> QueryStore:
        """Note the tokens of ``plan.observe``, whose queries ``keep`` stores."""
        ends = plan.q_len.cumsum()
        self._wanted = []
        for row, count, more in plan.observe.tolist():
            slot = int(plan.slots[row])
            end = int(ends[row])
            self._wanted.append((slot, end - count, end, more))
        return self

    def keep(self, layer: int, q: Tensor) -> None:
        """Store the queries of the tokens that ``of_step`` noted, from the queries q [T, heads, dim] of a layer."""
        for slot, first, end, more in self._wanted:
            self._add(slot, layer, q[first:end].clone(), more)

    def _add(self, slot: int, layer: int, new: Tensor, more: int) -> None:
        """Store the queries ``new`` [w, heads, dim] of a slot in a layer, with ``more`` behind the stored ones."""
        if more:
            new = torch.cat([self._kept[slot, layer], new])
        self._kept[slot, layer] = new

    def take(self, plan: StepPlan, queries: StepQueries) -> None:
        """Store copies of the queries that ``plan.observe`` requests from a replayed decode step, with one copy for all
        layers."""
        for slot, first, end, more in self.of_step(plan)._wanted:
            parts = [q[first:end] for q in queries.of_layer.values()]
            joined = torch.cat([part.flatten() for part in parts])
            copies = joined.split([part.numel() for part in parts])
            for layer, part, copied in zip(queries.of_layer, parts, copies, strict=True):
                self._add(slot, layer, copied.view(part.shape), more)

    def of(self, slot: int, layers: Sequence[AttnLayer]) -> Tensor | None:
        """Return the stored queries [w, layers * heads, dim] of a slot in the given layers; None if a layer has
        none."""
        found = []
        for layer in layers:
            q = self._kept.get((slot, layer.index))
            if q is None:
                return None
            found.append(q)
        return torch.cat(found, dim=1) if len(found) > 1 else found[0]

    def note(self, delta: Delta) -> None:
        """Drop the queries of sequences that left their slots, and copy the queries of a parent to its forks.

        A parent may leave its slot in the same step, and a fork may use a slot that another sequence has left.
        """
        copies: dict[tuple[int, int], Tensor] = {}
        for source, slot, _ in delta.fork.tolist():
            for (of, layer), q in self._kept.items():
                if of == source:
                    copies[slot, layer] = q
        for slot in delta.leave.tolist():
            self.forget(slot)
        self._kept.update(copies)

    def forget(self, slot: int) -> None:
        """Remove the stored queries of a slot."""
        for key in [key for key in self._kept if key[0] == slot]:
            del self._kept[key]
