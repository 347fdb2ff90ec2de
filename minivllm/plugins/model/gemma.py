"""The text models of Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786).

Norms precede and follow both attention and MLP, and store their difference from 1.  Most layers have a window.  Gemma 2
caps scores and logits.  Gemma 3 normalizes each head of q and k, and has a rotary embedding for each type of layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import AROUND, HEAD, MLP, DecoderSpec, LayerSpec, Norm, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields

from .assembly import decoder

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
NAMES = WeightNames(norms=NORMS)


class Gemma2(ModelArch):
    """The architecture ``Gemma2ForCausalLM``."""

    qk_norm: str | None = None

    def score_cap(self, cfg: Any) -> float | None:
        return cfg.attn_logit_softcapping

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        bias = cfg.attention_bias
        scale = cfg.query_pre_attn_scalar**-0.5
        cap = self.score_cap(cfg)
        mlp = MLP(cfg.intermediate_size, fields.activation(cfg, "hidden_activation"))
        windows = fields.windows(cfg, cfg.layer_types)
        layers = []
        for window, kind in zip(windows, cfg.layer_types, strict=True):
            attention = fields.attention(cfg, window, scale=scale, softcap=cap)
            rope = fields.rope(cfg, kind)
            layer = LayerSpec(attention, mlp, rope, norms=AROUND, qk_norm=self.qk_norm, qkv_bias=bias, out_bias=bias)
            layers.append(layer)
        norm = Norm(cfg.rms_norm_eps, offset=1.0)
        spec = decoder(cfg, layers, norm, names=NAMES)
        return replace(spec, embed_scale=cfg.hidden_size**0.5, logit_cap=cfg.final_logit_softcapping)


class Gemma3(Gemma2):
    """The architecture ``Gemma3ForCausalLM``."""

    qk_norm = HEAD

    def score_cap(self, cfg: Any) -> float | None:
        return None  # transformers ignores the field for layers of this type
