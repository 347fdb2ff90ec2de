"""GPT-2 (Radford et al. 2019, "Language models are unsupervised multitask learners"), with learned positions, LayerNorm
and GELU.

Weights are stored as [in, out].
"""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .assembly import decoder, layer_norm

NAMES = WeightNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{i}.",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    norms=("ln_1", "ln_2"),
    transposed=True,
)


class GPT2(ModelArch):
    """The architecture ``GPT2LMHeadModel``."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        if cfg.add_cross_attention:
            raise ModelError(
                "add_cross_attention=True: expected False, cross-attention to an encoder is not implemented"
            )
        hidden, heads = cfg.hidden_size, cfg.num_attention_heads
        if hidden % heads:
            raise ModelError(f"n_embd={shown(hidden)}: expected a multiple of n_head={heads}")
        dim = hidden // heads
        scale = dim**-0.5 if cfg.scale_attn_weights else 1.0
        inner = 4 * hidden if cfg.n_inner is None else cfg.n_inner
        activation = fields.activation(cfg, "activation_function")
        mlp = MLP(inner, activation, gated=False, bias=True)
        layers = []
        for i in range(cfg.num_hidden_layers):
            divisor = i + 1 if cfg.scale_attn_by_inverse_layer_idx else 1
            attention = AttnSpec(heads, heads, dim, dim, scale=scale / divisor)
            layer = LayerSpec(attention, mlp, rope=None, qkv_bias=True, out_bias=True)
            layers.append(layer)
        norm = layer_norm(cfg.layer_norm_epsilon)
        return decoder(cfg, layers, norm, positions=cfg.max_position_embeddings, names=NAMES)
