"""Repetition, presence and frequency penalties, computed anew each step from the token history on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Processor, Row, Rows

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

REPETITION, OUTPUT = 1, 2  # variant bits


class Penalties(Processor):
    """Repetition (Keskar et al., arXiv:1909.05858) counts prompt and output tokens: a logit above 0 is divided by the
    penalty, one below is multiplied.  Presence and frequency (OpenAI's) count output tokens only:
    logit -= frequency * count + presence * (count > 0).  In this order, as in vLLM.
    """

    reads = frozenset(
        (
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    )

    def columns(self) -> Mapping[str, Column]:
        return {"repetition": Column(fill=1.0), "presence": Column(), "frequency": Column()}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        variant = REPETITION * (params.repetition_penalty != 1)
        variant |= OUTPUT * (params.presence_penalty != 0 or params.frequency_penalty != 0)
        if not variant:
            return None
        values = {
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }
        return Row(values, variant)

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        if self.ctx.fuse and logits.is_cuda:
            from .triton_penalties import penalise

            return penalise(logits, rows, state["repetition"], state["presence"], state["frequency"])
        history = rows.history()
        index = torch.arange(history.shape[1], device=history.device)
        known = index < rows.position[:, None]
        history = torch.where(known, history, 0)  # what is stale may be anything; it counts 0 for token 0
        if rows.variant & REPETITION:
            penalty = state["repetition"][rows.slots][:, None]
            seen = _count(history, known, logits) > 0
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))
        if rows.variant & OUTPUT:
            count = _count(history, known & (index >= rows.prompt[:, None]), logits)
            present = (count > 0).to(logits.dtype)
            logits -= count.mul_(state["frequency"][rows.slots][:, None])
            logits -= present.mul_(state["presence"][rows.slots][:, None])


def _count(history: Tensor, counts: Tensor, logits: Tensor) -> Tensor:
    """Count how often each token occurs, [N, V], in a history i64 [N, L] weighted by ``counts`` [N, L].  The sums
    are whole numbers, so they do not depend on the order of the additions."""
    return torch.zeros_like(logits).scatter_add_(1, history, counts.to(logits.dtype))
