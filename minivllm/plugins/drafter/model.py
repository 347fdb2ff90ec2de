"""Drafts of a smaller model (Leviathan et al., arXiv:2211.17192), drawn with the noise of the row that they are for."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter


class ModelDrafter(Drafter):
    """k tokens, one after another.  Each is drawn from the draft model's logits as the engine draws from the model's:
    same processors, same limits, same noise.  Gumbel-max with common noise picks equal tokens more often than two
    independent draws would (a coupling: Daliri et al., arXiv:2408.07978), and greedy rows get the likeliest token."""

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        model = self.ctx.model
        assert model is not None
        tokens = [model.draw(ask, model.logits(ask, j), j) for j in range(ask.k)]
        return torch.stack(tokens, dim=1), torch.full_like(ask.rows.slots, ask.k)
