"""Apply repetition, presence and frequency penalties, computed in each step from the token history on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Processor, Row, Rows, State

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

REPETITION, OUTPUT = 1, 2  # variant bits


class Penalties(Processor):
    """The three penalties, in the order of vLLM.

    The repetition penalty (Keskar et al., arXiv:1909.05858) divides positive logits of tokens of prompt and output, and
    multiplies negative ones.  Presence and frequency penalties (OpenAI's) concern output tokens only:
    logit -= frequency * count + presence * (count > 0).
    """

    reads = frozenset(("repetition_penalty", "presence_penalty", "frequency_penalty"))

    def columns(self) -> Columns:
        repetition = Column(fill=1.0)
        return {"repetition": repetition, "presence": Column(), "frequency": Column()}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        repetition = params.repetition_penalty
        presence = params.presence_penalty
        frequency = params.frequency_penalty
        variant = 0
        if repetition != 1:
            variant |= REPETITION
        if presence != 0 or frequency != 0:
            variant |= OUTPUT
        if not variant:
            return None
        return Row({"repetition": repetition, "presence": presence, "frequency": frequency}, variant)

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        if self.ctx.fuse and logits.is_cuda:
            from .triton_penalties import penalize

            columns = [state[name] for name in ("repetition", "presence", "frequency")]
            return penalize(logits, rows, *columns)
        slots = rows.slots
        history = rows.history()
        index = torch.arange(history.shape[1], device=history.device)
        known = index < rows.position[:, None]
        # entries after the end of a history may be any number, so they become token 0 with count 0
        history = torch.where(known, history, 0)
        if rows.variant & REPETITION:
            penalty = state["repetition"][slots][:, None]
            seen = _count(history, known, logits) > 0
            penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(seen, penalized, logits))
        if rows.variant & OUTPUT:
            output = known & (index >= rows.prompt[:, None])
            count = _count(history, output, logits)
            present = (count > 0).to(logits.dtype)
            frequency = state["frequency"][slots]
            presence = state["presence"][slots]
            logits -= count.mul_(frequency[:, None])
            logits -= present.mul_(presence[:, None])


def _count(history: Tensor, counts: Tensor, logits: Tensor) -> Tensor:
    """Count how often each token occurs, [N, V], in a history i64 [N, L] weighted by ``counts`` [N, L].

    The sums are whole numbers, so they do not depend on the order of the additions.
    """
    found = torch.zeros_like(logits)
    return found.scatter_add_(1, history, counts.to(logits.dtype))
