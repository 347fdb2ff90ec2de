"""Phi-3 (arXiv:2404.14219) and Phi-4, which are Llama with checkpoints that store q, k and v in one tensor, and gate
and up in another.

The rotary embedding may cover a part of each head, with LongRoPE's two sets of frequencies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import DecoderSpec, WeightNames

from .mistral import Mistral


class Phi3(Mistral):
    """The architecture ``Phi3ForCausalLM``."""

    partial = True

    def describe(self, cfg: Any) -> DecoderSpec:
        names = WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
        return replace(super().describe(cfg), names=names)
