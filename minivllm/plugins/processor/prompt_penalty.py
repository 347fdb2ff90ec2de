"""Make tokens of the prompt more or less likely (transformers' ``encoder_repetition_penalty``).

A penalty above 1 keeps answers close to the prompt, a penalty below 1 prevents answers that repeat it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Processor, Row, Rows, State
from minivllm.device.worker.sampling import unpack_bits

from .spec import PROMPT_PENALTY

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

BITS = 32


class PromptPenalty(Processor):
    """A processor that multiplies positive logits of the prompt's tokens by the penalty, and divides negative ones."""

    reads = PROMPT_PENALTY.reads

    def columns(self) -> Columns:
        words = -(-self.ctx.vocab_size // BITS)
        # bit t % 32 of word t // 32 means that token t is in the prompt
        prompt = Column((words,), "int32")
        return {"prompt": prompt, "penalty": Column(fill=1.0)}

    def bind_prompt(self, params: SamplingParams, prompt: np.ndarray) -> Row | None:
        penalty = params.encoder_repetition_penalty
        if penalty == 1.0:
            return None
        words = -(-self.ctx.vocab_size // BITS)
        there = np.zeros(words * BITS, bool)
        there[prompt] = True
        packed = np.packbits(there, bitorder="little")
        return Row({"prompt": packed.view("<i4"), "penalty": penalty})

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        words = state["prompt"][rows.slots]
        there = unpack_bits(words, logits.shape[1])
        penalty = state["penalty"][rows.slots][:, None]
        changed = torch.where(logits > 0, logits * penalty, logits / penalty)
        torch.where(there, changed, logits, out=logits)
