"""Cohere's Command R and R7B, with attention and MLP in parallel after one LayerNorm.

The rotary embedding pairs neighbouring elements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, Rope, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError

from .assembly import decoder, layer_norm


class Cohere(ModelArch):
    """The architecture ``CohereForCausalLM``."""

    def windows(self, cfg: Any) -> list[int | None]:
        if cfg.use_qk_norm:
            raise ModelError("use_qk_norm=True: expected False, LayerNorm of each head of q and k is not implemented")
        return fields.windows(cfg, None)

    def rope(self, cfg: Any, window: int | None) -> Rope | None:
        return replace(fields.rope(cfg), interleaved=True)

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        bias = cfg.attention_bias
        mlp = MLP(cfg.intermediate_size, fields.activation(cfg))
        layers = []
        for window in self.windows(cfg):
            attention = fields.attention(cfg, window)
            rope = self.rope(cfg, window)
            layer = LayerSpec(attention, mlp, rope, parallel=True, qkv_bias=bias, out_bias=bias)
            layers.append(layer)
        norm = layer_norm(cfg.layer_norm_eps, bias=False)
        names = WeightNames(norms=("input_layernorm",))
        return decoder(cfg, layers, norm, logit_scale=cfg.logit_scale, names=names)


class Cohere2(Cohere):
    """The architecture ``Cohere2ForCausalLM``, in which only layers with a window have a rotary embedding."""

    def windows(self, cfg: Any) -> list[int | None]:
        return fields.windows(cfg, cfg.layer_types)

    def rope(self, cfg: Any, window: int | None) -> Rope | None:
        return None if window is None else super().rope(cfg, window)
