"""Draft what followed the last time.  Any guess is lawful: a wrong one costs time, never a token."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.plugin import Ask, Drafter


class MyPlugin(Drafter):
    """All rows at once, on the device, and nothing waits for it: no ``.item()``, no ``.tolist()``."""

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        history = ask.rows.history()  # [N, L]; behind ``known`` tokens there is anything
        known = ask.rows.position[:, None]
        at = torch.arange(history.shape[1], device=history.device)
        last = history.gather(1, known - 1)
        before = torch.where((history == last) & (at < known - 1), at, -1).amax(dim=1)  # -1: it is new
        index = before[:, None] + 1 + torch.arange(ask.k, device=history.device)
        tokens = history.gather(1, index.clamp(max=history.shape[1] - 1))
        count = torch.where(before >= 0, (known[:, 0] - 1 - before).clamp(max=ask.k), 0)
        return tokens, count
