"""The text models of Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786).

Norms precede and follow both attention and MLP, and store their difference from 1.  Most layers have a window.  Gemma 2
caps scores and logits.  Gemma 3 normalizes each head of q and k, and has a rotary embedding for each type of layer.
"""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import AROUND, HEAD, MLP, DecoderSpec, LayerSpec, Norm, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


class Gemma2(ModelArch):
    """The architecture ``Gemma2ForCausalLM``."""

    qk_norm: str | None = None

    def score_cap(self, cfg: Any) -> float | None:
        return cfg.attn_logit_softcapping

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        scale, cap = cfg.query_pre_attn_scalar**-0.5, self.score_cap(cfg)
        mlp = MLP(cfg.intermediate_size, fields.activation(cfg, "hidden_activation"))
        windows = fields.windows(cfg, cfg.layer_types)
        layers = [
            LayerSpec(
                fields.attention(cfg, window, scale=scale, softcap=cap),
                mlp,
                fields.rope(cfg, kind),
                norms=AROUND,
                qk_norm=self.qk_norm,
                qkv_bias=cfg.attention_bias,
                out_bias=cfg.attention_bias,
            )
            for window, kind in zip(windows, cfg.layer_types, strict=True)
        ]
        return DecoderSpec(
            cfg.vocab_size,
            cfg.hidden_size,
            tuple(layers),
            Norm(cfg.rms_norm_eps, offset=1.0),
            cfg.tie_word_embeddings,
            embed_scale=cfg.hidden_size**0.5,
            logit_cap=cfg.final_logit_softcapping,
            names=WeightNames(norms=NORMS),
        )


class Gemma3(Gemma2):
    """The architecture ``Gemma3ForCausalLM``."""

    qk_norm = HEAD

    def score_cap(self, cfg: Any) -> float | None:
        return None  # transformers ignores the field for layers of this type
