"""What a drafter's model must have in common with the model that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.device.loading.hf_config import context_said, longest_context
from minivllm.errors import ConfigError


@dataclass(frozen=True)
class DraftLimits:
    """Of the model: its vocabulary, the longest sequence, and the length at which its rotary embedding changes
    (``decoder.Rope.switch``).  Each check raises ConfigError; ``said`` names the draft model."""

    vocab: int
    max_len: int
    switch: int | None

    def check_config(self, said: str, own: Any) -> None:
        if own.vocab_size != self.vocab:
            raise ConfigError(
                f"{said} has vocab_size={own.vocab_size}; want {self.vocab}, as the model has: both must "
                "have one tokenizer"
            )
        most = longest_context(own)
        if most is not None and most < self.max_len:
            raise ConfigError(f"{said} has {context_said(own)}; want max_model_len={self.max_len}: lower that")

    def check_layers(self, said: str, specs: Sequence[AttnSpec], switch: int | None) -> None:
        if (None if switch is None or switch >= self.max_len else switch) != self.switch:
            raise ConfigError(
                f"{said} has another rotary embedding for requests longer than {switch} tokens, the model for those "
                f"longer than {self.switch} (None: for none); want both to change at one length, or max_model_len "
                "below it"
            )
        if any(s.window is not None for s in specs):
            raise ConfigError(f"{said} has layers with a sliding window; want full attention in all of them")
