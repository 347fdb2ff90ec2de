"""Granite 3 (https://github.com/ibm-granite), which is Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import DecoderSpec

from .llama import Llama


class Granite(Llama):
    """The architecture ``GraniteForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        spec = super().describe(cfg)
        layers = []
        for layer in spec.layers:
            attention = replace(layer.attention, scale=cfg.attention_multiplier)
            scaled = replace(layer, attention=attention, residual_scale=cfg.residual_multiplier)
            layers.append(scaled)
        logit_scale = 1.0 / cfg.logits_scaling
        return replace(spec, layers=tuple(layers), embed_scale=cfg.embedding_multiplier, logit_scale=logit_scale)
