"""The prompt's tokens become likelier, or less likely (transformers' ``encoder_repetition_penalty``): against answers
that leave the text that they are about, or that only repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Processor, Row, Rows
from minivllm.device.worker.sampling import unpack_bits

from .spec import PROMPT_PENALTY

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

BITS = 32


class PromptPenalty(Processor):
    """A logit of a token that is in the prompt is multiplied by the penalty if it is positive, else divided by it."""

    reads = PROMPT_PENALTY.reads

    def columns(self) -> Mapping[str, Column]:
        words = -(-self.ctx.vocab_size // BITS)
        # bit t % 32 of word t // 32: token t is in the prompt
        return {"prompt": Column((words,), "int32"), "penalty": Column(fill=1.0)}

    def bind_prompt(self, params: SamplingParams, prompt: np.ndarray) -> Row | None:
        penalty = params.encoder_repetition_penalty
        if penalty == 1.0:
            return None
        there = np.zeros(-(-self.ctx.vocab_size // BITS) * BITS, bool)
        there[prompt] = True
        words = np.packbits(there, bitorder="little").view("<i4")
        return Row({"prompt": words, "penalty": penalty})

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        there = unpack_bits(state["prompt"][rows.slots], logits.shape[1])
        penalty = state["penalty"][rows.slots][:, None]
        changed = torch.where(logits > 0, logits * penalty, logits / penalty)
        torch.where(there, changed, logits, out=logits)
