"""GLM-4 of 2025 (arXiv:2406.12793), with norms before and after attention and MLP.

Half of each head rotates, in neighbouring pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import AROUND, DecoderSpec, Rope, WeightNames
from minivllm.device.layers import fields

from .llama import Llama

NAMES = WeightNames(
    gate_up=("mlp.gate_up_proj",),
    norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)


class Glm4(Llama):
    """The architecture ``Glm4ForCausalLM``."""

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return cfg.attention_bias, False, False

    def rope(self, cfg: Any, layer: int) -> Rope:
        return replace(fields.rope(cfg, partial=True), interleaved=True)

    def describe(self, cfg: Any) -> DecoderSpec:
        spec = super().describe(cfg)
        layers = [replace(layer, norms=AROUND) for layer in spec.layers]
        return replace(spec, layers=tuple(layers), names=NAMES)
