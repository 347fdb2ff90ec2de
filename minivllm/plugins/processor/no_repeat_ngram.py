"""No n tokens in a row come twice (transformers' ``no_repeat_ngram_size``; Paulus et al., arXiv:1705.04304)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Processor, Row, Rows

from .spec import NO_REPEAT_NGRAM

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams


class NoRepeatNgram(Processor):
    """A token becomes -inf if with the n - 1 tokens before it it would make n tokens that are in prompt and output
    already; n = 1 bans every token that came.  Cost: n - 1 comparisons of the history with itself."""

    reads = NO_REPEAT_NGRAM.reads

    def columns(self) -> Mapping[str, Column]:
        return {"size": Column(dtype="int32")}  # 0 = off

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        n = params.no_repeat_ngram_size
        return Row({"size": n}, 1 << (n - 1).bit_length()) if n else None

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        history, size = rows.history(), state["size"][rows.slots][:, None]
        width, end = history.shape[1], rows.position[:, None]
        index = torch.arange(width, device=logits.device)
        banned = (size > 0) & (index < end) & (index >= size - 1)  # [N, L]: an n-gram that came ends there
        # the largest n of the step is at most the largest bit of the variant
        for back in range(1, min(1 << (rows.variant.bit_length() - 1), width) if rows.variant else 1):
            now = history.gather(1, (end - back).clamp(0, width - 1))  # the token so far back
            same = torch.zeros_like(banned)
            same[:, back:] = history[:, : width - back] == now
            banned &= same | (size <= back)
        push = torch.where(banned, float("-inf"), 0.0).to(logits.dtype)
        # added, not stored: what is stale may be any number, and falls on token 0 with 0
        logits.scatter_add_(1, torch.where(banned, history, 0), push)
