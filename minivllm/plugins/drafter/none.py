"""Run without speculation."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter


class NoDrafts(Drafter):
    """A drafter without drafts.  The trait ``drafts`` of its spec is 0, so the engine never calls it."""

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        slots = ask.rows.slots
        shape = (len(slots), ask.k)
        tokens = torch.zeros(shape, dtype=torch.int64, device=slots.device)
        return tokens, torch.zeros_like(slots)
