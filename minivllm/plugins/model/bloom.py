"""BLOOM (arXiv:2211.05100), whose scores fall with the distance of a key (ALiBi).  A norm follows the embedding."""

from __future__ import annotations

from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, Norm, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError


class Bloom(ModelArch):
    """The architecture ``BloomForCausalLM``, which BLOOMZ also has."""

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        if cfg.apply_residual_connection_post_layernorm:
            raise ModelError(
                "apply_residual_connection_post_layernorm=True: expected False, no other value is implemented"
            )
        hidden, heads = cfg.hidden_size, cfg.num_attention_heads
        dim = fields.even_share(cfg, "hidden_size", "n_head", heads)
        layer = LayerSpec(
            AttnSpec(heads, heads, dim, dim, alibi=fields.alibi(heads)),
            MLP(4 * hidden, "gelu_tanh", gated=False, bias=True),
            rope=None,
            qkv_bias=True,
            out_bias=True,
        )
        names = WeightNames(
            embed="transformer.word_embeddings",
            embed_norm="transformer.word_embeddings_layernorm",
            norm="transformer.ln_f",
            layer="transformer.h.{i}.",
            qkv=("self_attention.query_key_value",),
            qkv_groups=heads,
            out="self_attention.dense",
            gate_up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        )
        return DecoderSpec(
            cfg.vocab_size,
            hidden,
            (layer,) * cfg.num_hidden_layers,
            Norm(cfg.layer_norm_epsilon, centered=True, bias=True),
            cfg.tie_word_embeddings,
            names=names,
            embed_norm=True,
        )
