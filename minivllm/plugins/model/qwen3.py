"""Qwen3, dense (arXiv:2505.09388), which is Llama with RMSNorm on every head of q and k before the rotary embedding."""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import HEAD

from .qwen2 import Qwen2


class Qwen3(Qwen2):
    """The architecture ``Qwen3ForCausalLM``."""

    qk_norm = HEAD

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return cfg.attention_bias, cfg.attention_bias, False
