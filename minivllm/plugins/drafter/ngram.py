"""Prompt lookup (Saxena, 2023; "prompt lookup decoding"), which drafts the continuation of an earlier occurrence.

    history   ... a b c d e ...  x  b c       the last tokens b c have occurred before; d e followed them
    drafts                            d e

Answers often copy, quote or edit earlier text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter


class NGram(Drafter):
    """A drafter that proposes the tokens after the longest earlier occurrence of a row's last tokens.

    An occurrence has ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens.  Of equally long occurrences the latest is
    used.  If fewer than k tokens follow it, they are repeated, so a row gets k drafts or none.  The search runs on the
    device and takes O(history * prompt_lookup_max) operations per row.
    """

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        rows = ask.rows
        k = ask.k
        known = rows.position[:, None]
        newest = known - 1
        history = rows.tokens[rows.slots, : rows.max_position]
        length = history.shape[1]
        at = torch.arange(length, device=history.device)
        equal = torch.zeros_like(history, dtype=torch.int32)
        alive = at < newest  # whether an earlier occurrence ends at ``at``
        for back in range(min(self.options.prompt_lookup_max, length - 1)):
            place = (newest - back).clamp_(min=0)
            last = history.gather(1, place)
            same = torch.zeros_like(alive)
            same[:, back:] = history[:, : length - back] == last
            alive = alive & same & (newest > back)
            equal += alive
        long_enough = equal >= self.options.prompt_lookup_min
        rank = (equal * length + at).where(long_enough, -1)
        best, end = rank.max(dim=1, keepdim=True)
        period = (newest - end).clamp_(min=1)
        steps = torch.arange(k, device=history.device)
        follow = end + 1 + steps % period
        tokens = history.gather(1, follow.clamp_(max=length - 1))
        found = best[:, 0] >= 0
        return tokens.long(), torch.where(found, k, 0)
