"""BLOOM (arXiv:2211.05100), whose scores fall with the distance of a key (ALiBi).  A norm follows the embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError

from .assembly import decoder, layer_norm

NAMES = WeightNames(
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f",
    layer="transformer.h.{i}.",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


class Bloom(ModelArch):
    """The architecture ``BloomForCausalLM``, which is also that of BLOOMZ."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        if cfg.apply_residual_connection_post_layernorm:
            raise ModelError(
                "apply_residual_connection_post_layernorm=True: expected False, no other value is implemented"
            )
        heads = cfg.num_attention_heads
        dim = fields.even_share(cfg, "hidden_size", "n_head", heads)
        attention = AttnSpec(heads, heads, dim, dim, alibi=fields.alibi(heads))
        mlp = MLP(4 * cfg.hidden_size, "gelu_tanh", gated=False, bias=True)
        layer = LayerSpec(attention, mlp, rope=None, qkv_bias=True, out_bias=True)
        layers = [layer] * cfg.num_hidden_layers
        norm = layer_norm(cfg.layer_norm_epsilon)
        names = replace(NAMES, qkv_groups=heads)
        return decoder(cfg, layers, norm, names=names, embed_norm=True)
