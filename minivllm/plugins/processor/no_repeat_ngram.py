"""Prevent repeated n-grams (transformers' ``no_repeat_ngram_size``; Paulus et al., arXiv:1705.04304)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Processor, Row, Rows, State

from .ids import ban
from .spec import NO_REPEAT_NGRAM

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams


class NoRepeatNgram(Processor):
    """A processor that sets a token to -inf if it would complete n tokens that prompt and output already contain.

    n = 1 bans every token of prompt and output.  The cost is n - 1 comparisons of the history with itself.
    """

    reads = NO_REPEAT_NGRAM.reads

    def columns(self) -> Columns:
        return {"size": Column(dtype="int32")}  # 0 = off

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        n = params.no_repeat_ngram_size
        if not n:
            return None
        variant = 1 << (n - 1).bit_length()
        return Row({"size": n}, variant)

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        history = rows.history()
        size = state["size"][rows.slots][:, None]
        width = history.shape[1]
        end = rows.position[:, None]
        index = torch.arange(width, device=logits.device)
        # [N, L] whether the token at an index is banned; at first all indices at which n tokens may end
        banned = (size > 0) & (index < end) & (index >= size - 1)
        longest = 1
        if rows.variant:  # no n in the step is larger than the largest bit of ``rows.variant``
            bit = rows.variant.bit_length() - 1
            longest = min(1 << bit, width)
        for back in range(1, longest):
            at = (end - back).clamp(0, width - 1)
            now = history.gather(1, at)  # the token ``back`` positions before the end
            same = torch.zeros_like(banned)
            same[:, back:] = history[:, : width - back] == now
            banned &= same | (size <= back)
        ban(logits, history, banned)
