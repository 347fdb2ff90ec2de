"""No speculation."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter


class NoDrafts(Drafter):
    """Its spec says that it has no drafts, so the engine never asks."""

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        slots = ask.rows.slots
        return torch.zeros(len(slots), ask.k, dtype=torch.int64, device=slots.device), torch.zeros_like(slots)
