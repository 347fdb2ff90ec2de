"""OLMo 2 (arXiv:2501.00656) and OLMo 3, which are Llama with norms after attention and MLP, and RMSNorm over all heads
of q and of k.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import AFTER, WIDTH, DecoderSpec, WeightNames
from minivllm.device.layers import fields

from .llama import Llama

NAMES = WeightNames(norms=("post_attention_layernorm", "post_feedforward_layernorm"))


class Olmo2(Llama):
    """The architecture ``Olmo2ForCausalLM``."""

    qk_norm = WIDTH

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        return cfg.attention_bias, cfg.attention_bias, False

    def describe(self, cfg: Any) -> DecoderSpec:
        spec = super().describe(cfg)
        layers = [replace(layer, norms=AFTER) for layer in spec.layers]
        return replace(spec, layers=tuple(layers), names=NAMES)


class Olmo3(Olmo2):
    """The architecture ``Olmo3ForCausalLM``, in which most layers have a window and each type of layer has a rotary
    embedding.
    """

    def windows(self, cfg: Any) -> list[int | None]:
        return fields.windows(cfg, cfg.layer_types)

    def rope(self, cfg: Any, layer: int) -> Any:
        return fields.rope(cfg, cfg.layer_types[layer])
