"""Wrong processors of the prompt's token ids, made of the right one."""

from __future__ import annotations

import numpy as np
import torch

from minivllm.plugins.processor.prompt_penalty import PromptPenalty
from minivllm.registration.spec import ANY, Spec

SEAM = "processor"
EXACT = "test_logits_are_those_of_the_float64_reference"
FAULTS = {"OutputToo": (EXACT,), "FirstPromptForAll": (EXACT,), "SixteenBits": ("test_a_large_vocabulary",)}
RIGHT = ()


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 3), "a planted fault", limits={"device": ANY})


class OutputToo(PromptPenalty):
    """Counts drawn tokens as tokens of the prompt."""

    spec = spec("OutputToo")

    def apply(self, logits, rows, state):
        for j, (slot, end) in enumerate(zip(rows.slots.tolist(), rows.position.tolist(), strict=True)):
            ids = rows.tokens[slot, :end].unique().long()
            penalty = state["penalty"][slot]
            logits[j, ids] = torch.where(logits[j, ids] > 0, logits[j, ids] * penalty, logits[j, ids] / penalty)


class FirstPromptForAll(PromptPenalty):
    """Uses the first prompt for all requests."""

    spec = spec("FirstPromptForAll")
    first = None

    def bind_prompt(self, params, prompt):
        FirstPromptForAll.first = prompt if self.first is None else self.first
        return super().bind_prompt(params, self.first)


class SixteenBits(PromptPenalty):
    """Supports ids up to 65,535 only."""

    spec = spec("SixteenBits")

    def bind_prompt(self, params, prompt):
        return super().bind_prompt(params, prompt.astype(np.uint16).astype(np.int32))
