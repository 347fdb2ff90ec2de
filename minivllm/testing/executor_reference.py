"""What an executor must draw: transformers' tokens, or those of the function that its spec names instead of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minivllm.registry import import_target

from .driver import logits_after, tiny
from .faulty import TARGETS
from .spec import SpecConformance


class ExecutorReference(SpecConformance):
    """``seed`` says which of the tiny models; made-up tokens are the same for all of them."""

    @property
    def made_up(self) -> Any:
        """The function (token ids, vocabulary) -> logits of an executor that computes no model; None of others."""
        target = self.spec.traits.get("made_up")
        return None if target is None else import_target(target)

    @property
    def attention(self) -> str:
        """A back end that can be told to fail; no choice for an executor that runs none."""
        unused = str(self.spec.traits.get("unused", "")).split()
        return "auto" if "attention" in unused else f"{TARGETS}:FaultyAttention"

    def need_model(self) -> None:
        """Skip the test if there is none: no processor and no attention back end runs that could fail."""
        if self.made_up is not None:
            pytest.skip("excused: its tokens are made up, so no part of a model runs")

    def logits_after(self, tokens: Sequence[int], seed: int = 0) -> torch.Tensor:
        """f32 [V] of the next token."""
        if self.made_up is None:
            return logits_after(tuple(tokens), seed)
        return torch.from_numpy(np.asarray(self.made_up(np.array(tokens), tiny().model.config.vocab_size)))

    def greedy(self, prompt: Sequence[int], n: int, seed: int = 0) -> list[int]:
        """The n tokens that follow."""
        out = list(prompt)
        for _ in range(n):
            out.append(int(self.logits_after(out, seed).argmax()))
        return out[len(prompt) :]

    def likeliest(self, tokens: Sequence[int], allowed: Sequence[int]) -> int:
        """The next token among some."""
        return max(allowed, key=self.logits_after(tokens).tolist().__getitem__)
