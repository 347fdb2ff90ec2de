"""Arcee's AFM (transformers' ``ArceeForCausalLM``): pre-norm decoder, grouped-query attention, rotary embedding, and an
MLP of two matrices with squared ReLU between them (Primer, arXiv:2109.08668).

The model is a table.  The engine builds the layers, fuses those that can be fused, and finds the weights by their
usual names (``decoder.WeightNames``).  A model that a table cannot describe overrides ``attention``, ``build`` and
``weights`` instead.
"""

from __future__ import annotations

from typing import Any

from minivllm.plugin import MLP, DecoderSpec, LayerSpec, ModelArch, ModelError, Norm, fields


class MyPlugin(ModelArch):
    """A config value that changes the arithmetic and is not implemented raises a ModelError that names it."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        if getattr(cfg, "sliding_window", None):
            raise ModelError(f"sliding_window={cfg.sliding_window}: Arcee has no window; remove it from config.json")
        mlp = MLP(cfg.intermediate_size, fields.activation(cfg), gated=False, bias=cfg.mlp_bias)
        bias = cfg.attention_bias
        layer = LayerSpec(fields.attention(cfg), mlp, fields.rope(cfg), qkv_bias=bias, out_bias=bias)
        layers = (layer,) * cfg.num_hidden_layers
        norm = Norm(cfg.rms_norm_eps)
        return DecoderSpec(cfg.vocab_size, cfg.hidden_size, layers, norm, cfg.tie_word_embeddings)
