"""Falcon (arXiv:2311.16867), with parallel attention and MLP, few KV heads, and a rotary embedding or ALiBi."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import MLP, DecoderSpec, LayerSpec, WeightNames
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers import fields
from minivllm.errors import ModelError, shown

from .assembly import decoder, layer_norm

NAMES = WeightNames(
    embed="transformer.word_embeddings",
    norm="transformer.ln_f",
    layer="transformer.h.{i}.",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


class Falcon(ModelArch):
    """The architecture ``FalconForCausalLM`` in the forms of the 7B, of the 40B and 180B
    (``new_decoder_architecture``), and of the RW models.
    """

    def describe(self, cfg: Any) -> DecoderSpec:
        fields.check_plain(cfg)
        bias = cfg.bias
        groups, attention = self._attention(cfg)
        parallel, norms = self._norms(cfg)
        activation = fields.activation(cfg, "activation")
        mlp = MLP(cfg.ffn_hidden_size, activation, gated=False, bias=bias)
        rope = None if cfg.alibi else fields.rope(cfg)
        own_norm = parallel and len(norms) > 1  # the MLP has a norm besides that of attention
        layer = LayerSpec(attention, mlp, rope, parallel=parallel, qkv_bias=bias, out_bias=bias, mlp_norm=own_norm)
        layers = [layer] * cfg.num_hidden_layers
        norm = layer_norm(cfg.layer_norm_epsilon)
        names = replace(NAMES, qkv_groups=groups, norms=norms)
        return decoder(cfg, layers, norm, names=names)

    def _attention(self, cfg: Any) -> tuple[int, AttnSpec]:
        """Return the number of row groups in the tensor of q, k and v (a group has the rows of one KV head), and a
        layer's attention.
        """
        heads = cfg.num_attention_heads
        dim = fields.even_share(cfg, "hidden_size", "num_attention_heads", heads, rotary=not cfg.alibi)
        configured = cfg.num_kv_heads
        if cfg.new_decoder_architecture:
            kv_heads = configured
        elif cfg.multi_query:
            kv_heads = 1
        else:
            kv_heads = heads
            if configured not in (None, heads):
                raise ModelError(f"num_kv_heads={shown(configured)} with multi_query=False: expected {heads}")
        if type(kv_heads) is not int or kv_heads < 1 or heads % kv_heads:
            raise ModelError(f"num_kv_heads={shown(kv_heads)}: expected a divisor of num_attention_heads={heads}")
        slopes = None
        if cfg.alibi:
            # the slopes of ALiBi are rounded to bfloat16, and divided by the root of the head size as the scores are
            scale = math.sqrt(dim)
            slopes = tuple(_bfloat16(slope) / scale for slope in fields.alibi(heads))
        return kv_heads, AttnSpec(heads, kv_heads, dim, dim, alibi=slopes)

    def _norms(self, cfg: Any) -> tuple[bool, tuple[str, ...]]:
        """Return whether attention and MLP are computed in parallel, and the names of a layer's norms."""
        new = cfg.new_decoder_architecture
        parallel = cfg.parallel_attn
        if not parallel and not new:
            return False, ("input_layernorm", "post_attention_layernorm")
        allowed = (1, 2) if new else (1,)
        count = cfg.num_ln_in_parallel_attn
        if count is None:
            count = allowed[-1]
        if not parallel or count not in allowed:
            raise ModelError(
                f"parallel_attn={parallel}, num_ln_in_parallel_attn={shown(count)}, new_decoder_architecture={new}: "
                "expected parallel_attn=True, and num_ln_in_parallel_attn 1, or 2 in the new architecture"
            )
        if count == 2:
            return True, ("ln_attn", "ln_mlp")
        return True, ("input_layernorm",)


def _bfloat16(value: float) -> float:
    """Round a positive number to the nearest bfloat16, ties to even."""
    (bits,) = struct.unpack(">I", struct.pack(">f", value))
    is_odd = bits >> 16 & 1
    rounded = (bits + 0x7FFF + is_odd) & 0xFFFF0000
    return struct.unpack(">f", struct.pack(">I", rounded))[0]
