"""Propose tokens of a smaller model (Leviathan et al., arXiv:2211.17192), drawn with the noise of the target row."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter


class ModelDrafter(Drafter):
    """A drafter that draws k tokens of each row one after another from a draft model.

    The tokens are drawn as the engine draws the model's: with the same processors, limits and noise.  Gumbel-max with
    common noise picks equal tokens more often than two independent draws do (Daliri et al., arXiv:2408.07978).  Greedy
    rows get the most likely token.
    """

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        model = self.ctx.model
        assert model is not None
        tokens = []
        for j in range(ask.k):
            logits = model.logits(ask, j)
            tokens.append(model.draw(ask, logits, j))
        counts = torch.full_like(ask.rows.slots, ask.k)
        return torch.stack(tokens, dim=1), counts
