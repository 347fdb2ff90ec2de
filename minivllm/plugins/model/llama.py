"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783), a pre-norm decoder with grouped-query attention, rotary embedding
and SwiGLU.

Other families override methods of ``Llama``, or change fields of the layers that it describes.
"""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, Norm, Rope
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError

from .assembly import decoder


class Llama(ModelArch):
    """The architecture ``LlamaForCausalLM``."""

    qk_norm: str | None = None
    partial = False  # whether ``partial_rotary_factor`` is the rotated share of a head

    def biases(self, cfg: Any) -> tuple[bool, bool, bool]:
        """Return whether there are biases on q, k and v, on the output projection of attention, and in the MLP."""
        return cfg.attention_bias, cfg.attention_bias, cfg.mlp_bias

    def windows(self, cfg: Any) -> list[int | None]:
        """Return the attention window of each layer; None means all earlier tokens."""
        if getattr(cfg, "sliding_window", None):
            raise ModelError(f"sliding_window={cfg.sliding_window}: Llama has no window; remove it from config.json")
        return fields.windows(cfg, None)

    def rope(self, cfg: Any, layer: int) -> Rope | None:
        return fields.rope(cfg, partial=self.partial)

    def check(self, cfg: Any) -> None:
        fields.check_plain(cfg)

    def describe(self, cfg: Any) -> DecoderSpec:
        self.check(cfg)
        qkv_bias, out_bias, mlp_bias = self.biases(cfg)
        mlp = MLP(cfg.intermediate_size, fields.activation(cfg), bias=mlp_bias)
        layers = []
        for i, window in enumerate(self.windows(cfg)):
            attention = fields.attention(cfg, window)
            rope = self.rope(cfg, i)
            layer = LayerSpec(attention, mlp, rope, qk_norm=self.qk_norm, qkv_bias=qkv_bias, out_bias=out_bias)
            layers.append(layer)
        return decoder(cfg, layers, Norm(cfg.rms_norm_eps))
