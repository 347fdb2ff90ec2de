"""Falcon (arXiv:2311.16867), with parallel attention and MLP, few KV heads, and a rotary embedding or ALiBi."""

from __future__ import annotations

import math
import struct
from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, Norm, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown


class Falcon(ModelArch):
    """The architecture ``FalconForCausalLM`` in the forms of the 7B, of the 40B and 180B
    (``new_decoder_architecture``), and of the RW models.
    """

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        groups, attention = self._attention(cfg)
        parallel, norms = self._norms(cfg)
        layer = LayerSpec(
            attention,
            MLP(cfg.ffn_hidden_size, fields.activation(cfg, "activation"), gated=False, bias=cfg.bias),
            None if cfg.alibi else fields.rope(cfg),
            parallel=parallel,
            qkv_bias=cfg.bias,
            out_bias=cfg.bias,
            mlp_norm=parallel and len(norms) > 1,
        )
        names = WeightNames(
            embed="transformer.word_embeddings",
            norm="transformer.ln_f",
            layer="transformer.h.{i}.",
            qkv=("self_attention.query_key_value",),
            qkv_groups=groups,
            out="self_attention.dense",
            gate_up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            norms=norms,
        )
        return DecoderSpec(
            cfg.vocab_size,
            cfg.hidden_size,
            (layer,) * cfg.num_hidden_layers,
            Norm(cfg.layer_norm_epsilon, centered=True, bias=True),
            cfg.tie_word_embeddings,
            names=names,
        )

    def _attention(self, cfg: Any) -> tuple[int, AttnSpec]:
        """Return the groups of rows in the tensor of q, k and v, and the attention of a layer."""
        heads = cfg.num_attention_heads
        dim = fields.even_share(cfg, "hidden_size", "num_attention_heads", heads, rotary=not cfg.alibi)
        configured = cfg.num_kv_heads
        if cfg.new_decoder_architecture:
            groups = kv_heads = configured
        elif cfg.multi_query:
            groups, kv_heads = 1, 1
        else:
            groups, kv_heads = heads, heads
            if configured not in (None, heads):
                raise ModelError(f"num_kv_heads={shown(configured)} with multi_query=False: expected {heads}")
        if type(kv_heads) is not int or kv_heads < 1 or heads % kv_heads:
            raise ModelError(f"num_kv_heads={shown(kv_heads)}: expected a divisor of num_attention_heads={heads}")
        # the slopes are rounded to bfloat16, and scaled with the scores
        slopes = tuple(_bfloat16(slope) / math.sqrt(dim) for slope in fields.alibi(heads)) if cfg.alibi else None
        return groups, AttnSpec(heads, kv_heads, dim, dim, alibi=slopes)

    def _norms(self, cfg: Any) -> tuple[bool, tuple[str, ...]]:
        """Return whether attention and MLP are computed in parallel, and the names of a layer's norms."""
        new, parallel, count = cfg.new_decoder_architecture, cfg.parallel_attn, cfg.num_ln_in_parallel_attn
        count = (2 if new else 1) if count is None else count
        if not parallel and not new:
            return False, ("input_layernorm", "post_attention_layernorm")
        if not parallel or count not in ((1, 2) if new else (1,)):
            raise ModelError(
                f"parallel_attn={parallel}, num_ln_in_parallel_attn={shown(count)}, new_decoder_architecture={new}: "
                "expected parallel_attn=True, and num_ln_in_parallel_attn 1, or 2 in the new architecture"
            )
        return True, ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)


def _bfloat16(value: float) -> float:
    """Round a positive number to the nearest bfloat16, ties to even."""
    bits = int.from_bytes(struct.pack(">f", value), "big")
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack(">f", bits.to_bytes(4, "big"))[0]
