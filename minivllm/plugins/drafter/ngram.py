"""Prompt lookup (Saxena, 2023; "prompt lookup decoding"): text that is copied, quoted or edited says what comes next.

history   ... a b c d e ...  x  b c       the last tokens, b c, were there before; d e followed
drafts                            d e
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter


class NGram(Drafter):
    """The longest earlier occurrence of the row's last tokens, of ``prompt_lookup_min`` to ``prompt_lookup_max``; of
    equally long ones the latest.  Where it is close to the end what follows is continued as a repetition, so there are
    always k drafts or none.  O(history * prompt_lookup_max) a row, on the device."""

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        rows, k = ask.rows, ask.k
        known = rows.position[:, None]
        history = rows.tokens[rows.slots, : rows.max_position]
        length = history.shape[1]
        at = torch.arange(length, device=history.device)
        equal = torch.zeros(history.shape, dtype=torch.int32, device=history.device)
        alive = at < known - 1  # an occurrence that ends at ``at``, before the last token
        for back in range(min(self.options.prompt_lookup_max, length - 1)):
            last = history.gather(1, (known - 1 - back).clamp_(min=0))
            same = torch.zeros_like(alive)
            same[:, back:] = history[:, : length - back] == last
            alive = alive & same & (known > back + 1)
            equal += alive
        best, end = (equal * length + at).where(equal >= self.options.prompt_lookup_min, -1).max(dim=1, keepdim=True)
        period = (known - 1 - end).clamp_(min=1)
        follow = end + 1 + torch.arange(k, device=history.device) % period
        tokens = history.gather(1, follow.clamp_(max=length - 1))
        return tokens.long(), torch.where(best[:, 0] >= 0, k, 0)
