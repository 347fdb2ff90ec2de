"""Checks that a drafter, and the model of a drafter or processor, are compatible with the served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.executor import Part
from minivllm.device.loading.hf_config import describe_context, longest_context
from minivllm.errors import ConfigError


@dataclass(frozen=True)
class DraftLimits:
    """Limits from the served model: its vocabulary size, the longest sequence, and the length above which requests use
    other rotary frequencies (``decoder.Rope.switch``).  Each check raises ConfigError.  ``label`` names the second
    model in the message."""

    vocab: int
    max_len: int
    switch: int | None

    def check_config(self, label: str, cfg: Any) -> None:
        """Check the vocabulary and the context length in the config object of the second model."""
        if cfg.vocab_size != self.vocab:
            raise ConfigError(
                f"{label} has vocab_size={cfg.vocab_size}; expected {self.vocab}, the size of the served "
                "model: both must have the same tokenizer"
            )
        most = longest_context(cfg)
        if most is not None and most < self.max_len:
            raise ConfigError(
                f"{label} has {describe_context(cfg)}; expected at least max_model_len={self.max_len}: lower "
                "max_model_len"
            )

    def check_layers(self, label: str, specs: Sequence[AttnSpec], switch: int | None) -> None:
        """Check the rotary embedding and the attention layers of the second model."""
        self.check_switch(label, switch)
        if any(spec.window is not None for spec in specs):
            raise ConfigError(
                f"{label} has layers with a sliding window; expected a model with full attention in all layers"
            )

    def check_switch(self, label: str, switch: int | None) -> None:
        """Raise ConfigError unless the second model changes its rotary embedding at the same length as the served
        model."""
        if switch is not None and switch >= self.max_len:
            switch = None
        if switch != self.switch:
            raise ConfigError(
                f"{label} uses other rotary frequencies for requests longer than {switch} tokens, and the model for "
                f"requests longer than {self.switch} (None means never); expected the same length for both, or a "
                "smaller max_model_len"
            )


def refuse_split(part: Part, size: int, label: str) -> None:
    """Raise ConfigError if a drafter cannot draft for ``size`` processes that share a model.

    ``label`` begins the message."""
    reason = ""
    if "target_head" in part.features:
        reason = "its layers run on one device"
    elif "host_tokens" in part.features:
        reason = "processes may read different numbers of tokens on their hosts, and would draft different ones"
    if size > 1 and reason:
        raise ConfigError(
            f"{label}{part.name} with tensor_parallel_size={size}: {reason}; set tensor_parallel_size=1, or "
            "drafter=ngram"
        )
