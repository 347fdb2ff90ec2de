"""Arcee's AFM (transformers' ``ArceeForCausalLM``): pre-norm decoder, grouped-query attention, rotary embedding, and an
MLP of two matrices with squared ReLU between them (Primer, arXiv:2109.08668).

The model is a table: the engine builds it, fuses what can be fused, and knows where its weights are by their usual
names (``decoder.WeightNames``).  A model that no table can say overrides ``attention``, ``build`` and ``weights``
instead.
"""

from __future__ import annotations

from typing import Any

from minivllm.plugin import MLP, DecoderSpec, LayerSpec, ModelArch, ModelError, Norm, fields


class MyPlugin(ModelArch):
    """A config value that changes the arithmetic and is not implemented raises ModelError, which names it."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        if getattr(cfg, "sliding_window", None):
            raise ModelError(f"sliding_window={cfg.sliding_window}: Arcee has no window; remove it from config.json")
        layer = LayerSpec(
            fields.attention(cfg),
            MLP(cfg.intermediate_size, fields.activation(cfg), gated=False, bias=cfg.mlp_bias),
            fields.rope(cfg),
            qkv_bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
        )
        return DecoderSpec(
            cfg.vocab_size,
            cfg.hidden_size,
            (layer,) * cfg.num_hidden_layers,
            Norm(cfg.rms_norm_eps),
            cfg.tie_word_embeddings,
        )
