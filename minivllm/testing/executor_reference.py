"""The expected tokens of an executor, from transformers or from the function that its spec names."""

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
    """Compute the expected tokens of the suite of executors.

    ``seed`` chooses the weights of the tiny model.  An executor without a model computes its tokens with a function,
    which is the same for all seeds.
    """

    @property
    def made_up(self) -> Any:
        """Return the function (token ids, vocabulary size) -> logits that an executor without a model uses.

        None if the executor has a model.
        """
        target = self.spec.traits.get("made_up")
        return None if target is None else import_target(target)

    @property
    def attention(self) -> str:
        """Return the attention back end to use: one that can raise on purpose, or "auto" if the executor runs none."""
        unused = str(self.spec.traits.get("unused", "")).split()
        return "auto" if "attention" in unused else f"{TARGETS}:FaultyAttention"

    def need_model(self) -> None:
        """Skip the test if the executor has no model, so that it runs no processor and no attention back end."""
        if self.made_up is not None:
            pytest.skip("excused: its tokens are made up, so no part of a model runs")

    def logits_after(self, tokens: Sequence[int], seed: int = 0) -> torch.Tensor:
        """Return the expected logits of the next token after some tokens, float32 [V]."""
        if self.made_up is None:
            return logits_after(tuple(tokens), seed)
        logits = self.made_up(np.array(tokens), tiny().model.config.vocab_size)
        return torch.from_numpy(np.asarray(logits))

    def logprobs_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the expected log-probabilities of the next token after some tokens, float32 [V]."""
        return self.logits_after(tokens).log_softmax(-1)

    def greedy(self, prompt: Sequence[int], n: int, seed: int = 0) -> list[int]:
        """Return the n most likely tokens after a prompt."""
        tokens = list(prompt)
        for _ in range(n):
            logits = self.logits_after(tokens, seed)
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]

    def likeliest(self, tokens: Sequence[int], allowed: Sequence[int]) -> int:
        """Return the most likely next token among the allowed ones."""
        logits = self.logits_after(tokens).tolist()
        return max(allowed, key=logits.__getitem__)
