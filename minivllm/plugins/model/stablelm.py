"""StableLM (arXiv:2402.17834), with LayerNorm and a rotary embedding of a part of each head.

The 12B normalizes each head of q and k with separate weights.
"""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.decoder import HEADS, MLP, DecoderSpec, LayerSpec, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .assembly import decoder, layer_norm

NAMES = WeightNames(qk_norm=("self_attn.q_layernorm.norms.{e}", "self_attn.k_layernorm.norms.{e}"))


class StableLm(ModelArch):
    """The architecture ``StableLmForCausalLM``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        heads = cfg.num_attention_heads
        dim = fields.even_share(cfg, "hidden_size", "num_attention_heads", heads, rotary=True)
        if fields.head_dim(cfg) != dim:
            raise ModelError(
                f"head_dim={shown(cfg.head_dim)}: expected hidden_size / num_attention_heads, {dim}, or none"
            )
        attention = fields.attention(cfg)
        mlp = MLP(cfg.intermediate_size, fields.activation(cfg))
        rope = fields.rope(cfg, partial=True)
        parallel = cfg.use_parallel_residual
        qk_norm = HEADS if cfg.qk_layernorm else None
        layer = LayerSpec(attention, mlp, rope, parallel=parallel, qk_norm=qk_norm, qkv_bias=cfg.use_qkv_bias)
        layers = [layer] * cfg.num_hidden_layers
        norm = layer_norm(cfg.layer_norm_eps)
        return decoder(cfg, layers, norm, names=NAMES)
